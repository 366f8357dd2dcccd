"""The columns of the table are declared once: the page of telemetry has the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvd_hetero.columns import COLUMNS, Column
from hvd_hetero.rounds import RoundReport

PAGE = Path(__file__).parents[3] / "docs" / "telemetry.md"


def line(name: str, column: Column) -> str:
    kind = "integers" if column.whole else "numbers"
    return f"| `{name}` | list of {kind} | {column.unit}{' ' * bool(column.unit)}| {column.meaning} |"


def test_the_page_of_telemetry_has_each_column_that_is_written_and_no_other():
    page = PAGE.read_text()
    lines = {name: line(name, column) for name, column in COLUMNS.items() if column.written != "never"}
    assert [text for text in lines.values() if text not in page] == []
    found = set(re.findall(r"^\| `(\w+)` \| list of", page, re.MULTILINE))
    assert found == {*lines, "plan"}


def test_a_row_has_no_other_columns():
    with pytest.raises(TypeError, match="compute"):
        RoundReport(compute=1.0)
