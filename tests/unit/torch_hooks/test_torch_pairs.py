"""Every pair of options trains as one process does, or is refused by name; ``pairs.py`` draws random cases, too."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("torch")

import pairs

from hvd_hetero import late_tables

CASES = pairs.cases()
PAGE = Path(__file__).parents[3] / "docs" / "combinations.md"


@pytest.fixture(autouse=True)
def each_round_a_table(monkeypatch):
    monkeypatch.setattr(late_tables, "_COSTS_S", 0.0)
    pairs.prepare()


def name_of(case):
    others = [f"{name}={value}" for name, value in case.items() if value != pairs.OPTIONS[name][0]]
    return ", ".join(others) or "plain"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_pair_of_options_is_exact_or_refused_by_name(case):
    pairs.judged(case)


def test_the_cases_hold_every_pair_that_goes_together():
    held = {
        frozenset([(one, case[one]), (other, case[other])])
        for case in CASES
        for one, other in combinations(pairs.OPTIONS, 2)
    }
    for one, other in combinations(pairs.OPTIONS, 2):
        for value in pairs.OPTIONS[one]:
            for another in pairs.OPTIONS[other]:
                together = {one: value, other: another}
                assert frozenset(together.items()) in held or pairs.without_meaning(together) or pairs.implied(together)


def test_the_page_has_each_refusal_once():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert lines == list(dict.fromkeys(refusal.line for refusal in pairs.REFUSED))
