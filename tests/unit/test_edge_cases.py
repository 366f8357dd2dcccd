"""Every edge case that docs/reliability.md promises something about has the test that it names."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def rows():
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    table = text.partition("## Edge cases, and the tests that hold them")[2]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if "::" in line]


def test_there_are_edge_cases():
    assert len(rows()) >= 21
    assert all(len(row) == 3 for row in rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_test_that_an_edge_case_names_exists_and_asserts_something(row):
    path, name = row[2].strip("`| ").split("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert len(found) == 1
    assert any(map(asserts, ast.walk(found[0])))


def asserts(node):
    """An assert, or ``with pytest.raises(…)`` or ``pytest.warns``."""
    if isinstance(node, ast.With):
        return any(ast.unparse(item.context_expr).startswith(("pytest.raises", "pytest.warns")) for item in node.items)
    return isinstance(node, ast.Assert)
