"""D-PSGD, MATCHA, local updates and the paper's learning-rate rule do what their equations say, sample by sample."""

from __future__ import annotations

from pathlib import Path

import pytest
from limits import TORCH_S

from hvd_hetero.testing import launch

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "averaging.py"
# Adam counts its steps in float32, so their weighted mean has no more digits than that.
LOOSER = {"elastic-bsp, local, adam": 1e-6}


@pytest.fixture(scope="module", params=[2, 3, 4], ids=["two", "three", "four"])
def outcome(request):
    return launch(WORKER, request.param, timeout_s=TORCH_S).reports[0]


def test_every_rank_holds_the_parameters_of_the_oracle_after_40_rounds(outcome):
    assert len(outcome["cases"]) == 8
    for name, case in outcome["cases"].items():
        assert case["difference"] <= LOOSER.get(name, 1e-10), name


def test_ranks_that_average_with_everybody_hold_the_same_bits_and_others_do_not(outcome):
    for name, case in outcome["cases"].items():
        assert (case["between_ranks"] == 0) == ("psgd" not in name and "matcha" not in name), name


def test_on_four_ranks_a_ring_has_ranks_that_are_no_neighbours(outcome):
    """On fewer it is the complete graph, where wrong neighbours would go unnoticed."""
    for name, case in outcome["cases"].items():
        if "psgd" in name or "matcha" in name:
            assert case["strangers"] == ([[2, 0], [3, 1]] if outcome["ranks"] == 4 else []), name


def test_d_psgd_takes_equal_parts_of_both_neighbours_and_of_itself(outcome):
    n = outcome["ranks"]
    near = [{rank, (rank + 1) % n, (rank - 1) % n} for rank in range(n)]
    for name, case in outcome["cases"].items():
        if "d-psgd" in name:
            for row, members in zip(case["first_mix"], near, strict=True):
                assert row == pytest.approx([(j in members) / len(members) for j in range(n)]), name


def test_no_sample_is_visited_twice_before_all_were_visited_once(outcome):
    for name, case in outcome["cases"].items():
        samples = outcome["samples"]
        done, visited, total = 0, [], case["visited"]
        for r, round_samples in enumerate(total):
            visited += round_samples
            done += sum(case["done"][r])
            if done == samples:
                assert sorted(visited) == list(range(samples)), name
                done, visited = 0, []
            assert done < samples, name
        assert len(set(visited)) == len(visited), name


def test_ranks_did_unequal_work_where_the_policy_lets_them(outcome):
    for name, case in outcome["cases"].items():
        uneven = sum(len(set(done)) > 1 for done in case["done"])
        assert uneven >= 5 or name.startswith("bsp"), name
