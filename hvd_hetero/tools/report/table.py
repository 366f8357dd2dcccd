"""A table of text, which the terminal and the page print alike."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings. The first column is on the left, the others are figures."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bars: dict[int, list[float]] = field(default_factory=dict)
    """For a column, the share of each row that a bar shows."""
    spare: frozenset[int] = frozenset()
    """Columns that a narrow screen leaves out."""
    words: frozenset[int] = frozenset()
    """Columns of words, besides the first."""
