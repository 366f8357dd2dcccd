"""Gate: no room grows unless another shrinks, and no class holds, or passes on, more than it did.

    python scripts/gates/size.py                     # compare the code with size.json
    python scripts/gates/size.py --write             # lower the limits to what is there
    python scripts/gates/size.py --write --why "…"   # raise them, and keep the reason with the figures

``size.json`` has the limits: lines and characters of each room, of tests, benchmarks, scripts and examples; their sum
for the package, which is its budget; and the classes that have more than fifteen attributes, or pass on more than five
things of one attribute. A room is a folder of a package, or all modules outside of folders. It may grow by what others
lose: ``--write`` moves the limits as long as no sum grows. A budget follows the code once it is 100 lines below.
Outside of the package 100 lines more are no matter until the limits are written.

An attribute is a name that a method assigns to ``self``, or a field of a data class that is not frozen. A class passes
on each method that only returns, calls or sets something of one of its attributes. Exit code 0 or 1.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from house import ROOT, paths, room

LIMITS = Path(__file__).with_suffix(".json")
YARD = ("tests", "benchmarks", "scripts", "examples")
ATTRIBUTES, PASSED_ON = 15, 5
SLACK_LINES, SLACK_CHARACTERS = 100, 5000

Sizes = dict[str, list[int]]
"""Lines and characters by name."""


def room_of(module: str, path: Path) -> str:
    """Return the folder that a module is in, one room for all that is in folders of it; or its package."""
    found = room(module)
    in_a_folder = path.stem == "__init__" or module != found
    return found if in_a_folder else found.rpartition(".")[0]


def add(sizes: Sizes, name: str, path: Path) -> None:
    """Count a file's lines and characters for a room."""
    text = path.read_text(encoding="utf-8")
    lines, characters = sizes.get(name, (0, 0))
    sizes[name] = [lines + text.count("\n"), characters + len(text)]


def attributes(found: ast.ClassDef) -> int:
    """Return how many attributes a class has by itself."""
    names = {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    decorators = [ast.unparse(each) for each in found.decorator_list]
    if any("dataclass" in each and "frozen=True" not in each for each in decorators):
        names |= {
            node.target.id
            for node in found.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    return len(names)


def passed_on(method: ast.stmt) -> str | None:
    """Return the attribute of which a method only passes something on; None if it does more."""
    if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    body = method.body[1:] if ast.get_docstring(method) is not None else method.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr | ast.Assign):
        return None
    value = body[0].targets[0] if isinstance(body[0], ast.Assign) else body[0].value
    target = value.func if isinstance(value, ast.Call) else value
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Attribute):
        owner = target.value
        if isinstance(owner.value, ast.Name) and owner.value.id == "self":
            return owner.attr
    return None


def measured() -> dict[str, Any]:
    """Return what size.json says of the code as it is, without the reasons."""
    rooms: Sizes = {}
    yard: Sizes = {}
    large, passing = {}, {}
    for module, path in paths().items():
        add(rooms, room_of(module, path), path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                if (count := attributes(node)) > ATTRIBUTES:
                    large[f"{module}.{node.name}"] = count
                owners = Counter(owner for each in node.body if (owner := passed_on(each)) is not None)
                if (most := max(owners.values(), default=0)) > PASSED_ON:
                    passing[f"{module}.{node.name}"] = most
    for name in YARD:
        for path in sorted((ROOT / name).rglob("*.py")):
            add(yard, name, path)
    rooms = dict(sorted(rooms.items()))
    return {"package": total(rooms), "rooms": rooms, "yard": yard, "attributes": large, "passes_on": passing}


def total(sizes: Sizes) -> list[int]:
    """Return the sums of lines and of characters."""
    return [sum(column) for column in zip(*sizes.values(), strict=True)]


def problems(code: dict[str, Any], limits: dict[str, Any]) -> list[str]:
    """Return what is larger than its limit, or far below."""
    said = []
    for kind, slack in (("rooms", (0, 0)), ("yard", (SLACK_LINES, SLACK_CHARACTERS))):
        for name, size in code[kind].items():
            limit = limits[kind].get(name, [0, 0])
            said += [
                f"{name} has {here:,} {unit}, its limit is {most:,}: make it smaller, or another room, then --write"
                for here, most, free, unit in zip(size, limit, slack, ("lines", "characters"), strict=True)
                if here > most + free
            ]
    if any(here > most for here, most in zip(total(limits["rooms"]), limits["package"], strict=True)):
        said.append("the limits of the rooms add up to more than the package's: write them by --write, which asks why")
    for kind, unit, free in (
        ("attributes", "attributes", ATTRIBUTES),
        ("passes_on", "methods that pass on", PASSED_ON),
    ):
        said += [
            f"{name} has {count} {unit}, its limit is {most}: part it, so that each part uses its own"
            for name, count in code[kind].items()
            if count > (most := limits[kind].get(name, free))
        ]
    if code["package"][0] < limits["package"][0] - SLACK_LINES:
        said.append(
            f"the package is {limits['package'][0] - code['package'][0]} lines below its budget: lower it by --write"
        )
    return said


def growth(code: dict[str, Any], limits: dict[str, Any]) -> dict[str, list[int]]:
    """Return by how many lines and characters the package, and each part of the yard, is above its budget."""
    pairs = {"package": (code["package"], limits["package"])}
    pairs |= {name: (size, limits["yard"].get(name, [0, 0])) for name, size in code["yard"].items()}
    grown = {name: [max(0, here - most) for here, most in zip(*pair, strict=True)] for name, pair in pairs.items()}
    grown |= {name: [n - limits["attributes"].get(name, ATTRIBUTES)] for name, n in code["attributes"].items()}
    grown |= {
        f"{name}, passed on": [n - limits["passes_on"].get(name, PASSED_ON)] for name, n in code["passes_on"].items()
    }
    return {name: by for name, by in grown.items() if max(by) > 0}


def write(code: dict[str, Any], limits: dict[str, Any], why: str | None) -> int:
    """Write the code's sizes as the limits, unless a sum grows without a reason."""
    grown, reasons = growth(code, limits), limits["reasons"]
    if grown and not why:
        print(f"these grow (lines, characters): {grown}; make them smaller, or say --why")
        return 1
    if grown:
        reasons = [*reasons, {"why": why, "grown": grown}]
    parts = (code | {"reasons": reasons}).items()
    LIMITS.write_text(
        "{\n" + ",\n".join(f'"{name}": {by_line(part)}' for name, part in parts) + "\n}\n", encoding="utf-8"
    )
    return 0


def by_line(part: Any) -> str:
    """Write a list or a table of limits, one entry a line, so that two changes seldom meet in one."""
    if isinstance(part, dict):
        entries = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in part.items()]
        return "{\n" + ",\n".join(entries) + "\n}"
    if part and isinstance(part[0], dict):
        return "[\n " + ",\n ".join(json.dumps(entry, ensure_ascii=False) for entry in part) + "\n]"
    return json.dumps(part)


def main() -> int:
    """Run the gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the limits anew")
    parser.add_argument("--why", help="the reason why a sum grows, which is kept")
    options = parser.parse_args()
    code, limits = measured(), json.loads(LIMITS.read_text(encoding="utf-8"))
    if options.write:
        return write(code, limits, options.why)
    found = problems(code, limits)
    for said in found:
        print(said)
    lines, characters = code["package"]
    print(
        f"{lines:,} lines and {characters:,} characters in {len(code['rooms'])} rooms, "
        f"{len(code['attributes'])} classes of more than {ATTRIBUTES} attributes; {len(found)} against the limits"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
