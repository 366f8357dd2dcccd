"""Other people's trainers around our optimizer, with one sample more than whole rounds."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(pool):
    with pool("torch_ported.py", 2, "torch") as ranks:
        yield ranks


@pytest.mark.parametrize("trainer", ["lightning", "transformers"])
def test_a_trainer_around_our_optimizer_trains_as_one_process_does(ranks, trainer):
    for rank in ranks:
        outcome = rank[trainer]
        assert outcome["off"] < 1e-14
        assert outcome["spread"] == 0.0
        assert outcome["moved"] > 0.05
        assert outcome["rounds"] == 4
    assert ranks[0]["lightning"]["seen"] == [18, 16]
