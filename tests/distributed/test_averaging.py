"""D-PSGD, MATCHA, local updates and the paper's learning-rate rule do what their equations say, sample by sample."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed
CASES = [
    "static, d-psgd",
    "non-blocking, d-psgd",
    "non-blocking, matcha",
    "elastic-bsp, local, momentum",
    "elastic-bsp, local, adam",
    "non-blocking, n/N",
]
# Adam counts its steps in float32, so their weighted mean has no more digits than that.
LOOSER = {"elastic-bsp, local, adam": 1e-6}


# Two ranks, which are each other's only neighbours: on threads, in tests/unit/torch_hooks.
FOUR, OVER_TORCH = "four", "three of torch.distributed"
JOBS = {FOUR: (4, "torch"), OVER_TORCH: (3, "torch.distributed")}
OF_TORCH = ["static, d-psgd", "non-blocking, matcha", "elastic-bsp, local, momentum"]  # one of each way to average


@pytest.fixture(scope="module", params=list(JOBS))
def ranks(request, pool):
    with pool("averaging.py", *JOBS[request.param]) as ranks:
        yield ranks


class Averaging:
    def test_every_rank_holds_the_parameters_of_the_oracle_after_20_rounds(self, ranks, case):
        assert ranks[0][case]["difference"] <= LOOSER.get(case, 1e-10)

    def test_ranks_that_average_with_everybody_hold_the_same_bits_and_others_do_not(self, ranks, case):
        with_neighbours = "psgd" in case or "matcha" in case
        assert (ranks[0][case]["between_ranks"] == 0) == (not with_neighbours)
        # On fewer than four ranks a ring is the complete graph, where wrong neighbours would go unnoticed.
        assert ranks[0][case]["strangers"] == ([[2, 0], [3, 1]] if with_neighbours and len(ranks) == 4 else [])

    def test_no_sample_is_visited_twice_before_all_were_visited_once(self, ranks, case):
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

    def test_ranks_did_unequal_work(self, ranks, case):
        assert sum(len(set(done)) > 1 for done in ranks[0][case]["done"]) >= 5


@pytest.mark.parametrize("ranks", [FOUR], indirect=True, scope="module")
@pytest.mark.parametrize("case", CASES)
class TestOnFourRanks(Averaging):
    pass


@pytest.mark.parametrize("ranks", [OVER_TORCH], indirect=True, scope="module")
@pytest.mark.parametrize("case", OF_TORCH)
class TestOnRanksOfTorch(Averaging):
    pass


def test_d_psgd_takes_equal_parts_of_both_neighbours_and_of_itself(ranks):
    n = len(ranks)
    near = [{rank, (rank + 1) % n, (rank - 1) % n} for rank in range(n)]
    for row, members in zip(ranks[0]["static, d-psgd"]["first_mix"], near, strict=True):
        assert row == pytest.approx([(j in members) / len(members) for j in range(n)])
