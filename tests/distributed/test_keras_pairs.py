"""Every pair of Keras's options trains as one process does, or is refused by name; ``keras_pairs.py`` draws others."""

from __future__ import annotations

from pathlib import Path

import keras_pairs as pairs
import pytest

pytestmark = pytest.mark.distributed
CASES = pairs.cases()
PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"


@pytest.fixture(scope="module")
def ranks(pool):
    with pool(pairs.WORKER, 2, "Keras 3") as ranks:
        yield ranks


def name_of(case):
    others = [f"{name}={value}" for name, value in case.items() if value != pairs.OPTIONS[name][0]]
    return ", ".join(others) or "plain"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_pair_of_options_is_exact_or_refused_by_name(ranks, case):
    pairs.judged(case, ranks)


def test_the_page_has_each_refusal_once():
    section = PAGE.read_text().partition("## Keras")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    assert lines == list(dict.fromkeys(refusal.line for refusal in pairs.REFUSED))
