"""Scripts end the process groups that they make: a thread of one that is left may abort its process at exit."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPTS = [
    p for folder in ("examples", "benchmarks", "tests/distributed/workers") for p in (ROOT / folder).rglob("*.py")
]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def calls(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}


def test_each_script_that_makes_a_process_group_ends_it():
    making = {path: called for path in SCRIPTS if "init_process_group" in (called := calls(path))}
    assert len(making) > 8, "there are such scripts"
    assert [str(path) for path, called in making.items() if "destroy_process_group" not in called] == []


def test_each_listing_of_a_loop_that_makes_a_process_group_ends_it():
    listings = [
        text for page in PAGES for text in re.findall(r"```(?:diff|python)\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    loops = [text for text in listings if "init_process_group(" in text and re.search(r"\bfor \w|\.fit\(", text)]
    assert len(loops) > 3, "there are such listings"
    assert [text for text in loops if "destroy_process_group()" not in text] == []
