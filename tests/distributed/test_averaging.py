"""D-PSGD, MATCHA, local updates and the paper's learning-rate rule do what their equations say, sample by sample."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed
CASES = [
    "bsp, d-psgd",
    "static, d-psgd",
    "non-blocking, d-psgd",
    "bsp, matcha",
    "non-blocking, matcha",
    "elastic-bsp, local, momentum",
    "elastic-bsp, local, adam",
    "non-blocking, n/N",
]
NEIGHBOURS = [case for case in CASES if "psgd" in case or "matcha" in case]
# Adam counts its steps in float32, so their weighted mean has no more digits than that.
LOOSER = {"elastic-bsp, local, adam": 1e-6}


# Two ranks, which are each other's only neighbours: on threads, in tests/unit/torch_hooks.
JOBS = {"four": (4, "torch"), "three of torch.distributed": (3, "torch.distributed")}


@pytest.fixture(scope="module", params=list(JOBS))
def ranks(request, pool):
    with pool("averaging.py", *JOBS[request.param]) as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES)
def test_every_rank_holds_the_parameters_of_the_oracle_after_20_rounds(ranks, case):
    assert ranks[0][case]["difference"] <= LOOSER.get(case, 1e-10)


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_average_with_everybody_hold_the_same_bits_and_others_do_not(ranks, case):
    assert (ranks[0][case]["between_ranks"] == 0) == (case not in NEIGHBOURS)


@pytest.mark.parametrize("case", NEIGHBOURS)
def test_on_four_ranks_a_ring_has_ranks_that_are_no_neighbours(ranks, case):
    """On fewer it is the complete graph, where wrong neighbours would go unnoticed."""
    assert ranks[0][case]["strangers"] == ([[2, 0], [3, 1]] if len(ranks) == 4 else [])


@pytest.mark.parametrize("case", [case for case in CASES if "d-psgd" in case])
def test_d_psgd_takes_equal_parts_of_both_neighbours_and_of_itself(ranks, case):
    n = len(ranks)
    near = [{rank, (rank + 1) % n, (rank - 1) % n} for rank in range(n)]
    for row, members in zip(ranks[0][case]["first_mix"], near, strict=True):
        assert row == pytest.approx([(j in members) / len(members) for j in range(n)])


@pytest.mark.parametrize("case", CASES)
def test_no_sample_is_visited_twice_before_all_were_visited_once(ranks, case):
    outcome = ranks[0][case]
    samples = outcome["samples"]
    done, visited = 0, []
    for r, round_samples in enumerate(outcome["visited"]):
        visited += round_samples
        done += sum(outcome["done"][r])
        if done == samples:
            assert sorted(visited) == list(range(samples))
            done, visited = 0, []
        assert done < samples
    assert len(set(visited)) == len(visited)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("bsp")])
def test_ranks_did_unequal_work_where_the_policy_lets_them(ranks, case):
    assert sum(len(set(done)) > 1 for done in ranks[0][case]["done"]) >= 5
