"""Gate: imports keep to the rules of the house, also those that only a type checker runs.

- Imports are absolute.
- There is no circle of modules, and none of rooms: neither a module nor a room imports itself, by whatever detour. A
  room is a folder of a package (of ``hvd_hetero.tools`` one below it), or a module outside them.
- What trains imports no tool and nothing that is for tests: ``hvd_hetero.tools`` and ``hvd_hetero.testing``.
- The core imports no adapter, and an adapter imports no other.
- Solvers (``allocation``, ``barriers``) import nothing of the core but errors, checks of arguments, and lazy names.
- The builder of Horovod imports nothing of the project, and only the command line imports it.
- A name that begins with an underscore stays in its package.

A package's ``__init__`` that is imported counts as a separate module. Exit code 0 or 1.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CORE, ADAPTERS = "hvd_hetero", ("torch_hooks", "keras_callbacks")
SOLVERS = (f"{CORE}.allocation", f"{CORE}.barriers")
MAY_BE_IMPORTED_BY_SOLVERS = (*SOLVERS, f"{CORE}.checks", f"{CORE}.errors", f"{CORE}.lazy")
TOOLS, TESTING = f"{CORE}.tools", f"{CORE}.testing"
COMMAND_LINE = f"{TOOLS}.cli"
BUILDER = "horovod_build"
FOLDERS = {CORE: ROOT, **dict.fromkeys(ADAPTERS, ROOT), BUILDER: ROOT / "packaging" / "horovod"}


def paths() -> dict[str, Path]:
    """Return the file of every module of the packages."""
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path
        for package, folder in FOLDERS.items()
        for path in sorted((folder / package).rglob("*.py"))
    }


def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of every module of the packages."""
    return {name: ast.parse(path.read_text(encoding="utf-8"), path) for name, path in paths().items()}


def imports(tree: ast.Module, known: dict[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for everything a module imports from the packages; the name is empty for whole modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield (submodule, "") if submodule in known else (node.module, alias.name)


def relative_imports(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield what is wrong with the imports that `imports` does not see."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            yield f"{module} imports {'.' * node.level}{node.module or ''} by a relative name"


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another: the strongly connected components (Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in graph[module]:
            if other not in number:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1 or module in graph[module]:
                found.append(sorted(group))

    for module in graph:
        if module not in number:
            visit(module)
    return found


def room(module: str) -> str:
    """Return the folder of its package that a module is in, or the module itself if it is in none."""
    depth = 3 if module.startswith(f"{TOOLS}.") else 2
    return ".".join(module.split(".")[:depth])


def rooms(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return which rooms import which others."""
    found: dict[str, set[str]] = {}
    for module, targets in graph.items():
        found.setdefault(room(module), set()).update({room(target) for target in targets} - {room(module)})
        for target in targets:
            found.setdefault(room(target), set())
    return found


def broken_rules(module: str, target: str, name: str) -> Iterator[str]:
    """Yield what is wrong with one import."""
    package, other = module.partition(".")[0], target.partition(".")[0]
    if other in ADAPTERS and other != package:
        yield f"{module} imports the adapter {target}"
    if module.startswith(SOLVERS) and not target.startswith(MAY_BE_IMPORTED_BY_SOLVERS):
        yield f"{module} is a solver, and imports {target}"
    if not module.startswith((TOOLS, TESTING)) and target.startswith((TOOLS, TESTING)):
        yield f"{module} trains, and imports {target}"
    if module.startswith(TESTING) and target.startswith(TOOLS):
        yield f"{module} is for tests, and imports the tool {target}"
    if BUILDER in (package, other) and package != other and not module.startswith(COMMAND_LINE):
        yield f"{module} imports {target}: only the command line imports the builder, which imports nothing else"
    private = [part for part in (*target.split("."), name) if part.startswith("_") and not part.startswith("__")]
    if private and module.rpartition(".")[0] != target.rpartition(".")[0]:
        yield f"{module} imports {private[0]} of {target}, which is private there"


def main() -> int:
    """Run the gate."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    known = modules()
    edges = {module: list(imports(tree, known)) for module, tree in known.items()}
    problems = [
        said for m, targets in edges.items() for target, name in targets for said in broken_rules(m, target, name)
    ]
    problems += [said for module, tree in known.items() for said in relative_imports(module, tree)]
    graph = {module: {target for target, _ in targets} for module, targets in edges.items()}
    problems += [f"these import one another: {', '.join(group)}" for group in circles(graph)]
    problems += [f"these rooms import one another: {', '.join(group)}" for group in circles(rooms(graph))]
    if not circles({"a": {"b"}, "b": {"a"}}) or not list(broken_rules("hvd_hetero.rounds", "torch_hooks.loader", "")):
        problems.append("the gate itself is open: it finds neither a circle nor an adapter in the core")
    made_up = {"hvd_hetero.data.a": {"hvd_hetero.policies.b"}, "hvd_hetero.policies.c": {"hvd_hetero.data.d"}}
    if not circles(rooms(made_up)) or not list(broken_rules("hvd_hetero.session", "hvd_hetero.tools.report.work", "")):
        problems.append("the gate itself is open: it finds neither a circle of rooms nor a tool in what trains")
    if not list(broken_rules("hvd_hetero.rounds", "horovod_build.plan", "")):
        problems.append("the gate itself is open: it does not find the builder in the core")
    if not list(relative_imports("hvd_hetero.rounds", ast.parse("from . import errors"))):
        problems.append("the gate itself is open: it does not see a relative import")
    for said in problems:
        print(said)
    print(
        f"{len(known)} modules in {len(rooms(graph))} rooms, {sum(map(len, graph.values()))} imports, "
        f"{len(problems)} against the rules"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
