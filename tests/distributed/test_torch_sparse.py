"""Sparse gradients: exact under every policy that averages gradients, whoever has rows and whoever has none."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed
EXACT = [
    "bsp",
    "static, one rank without data",
    "every round another",
    "non-blocking",
    "elastic-bsp",
    "momentum",
    "adagrad",
    "sparse adam",
    "sparse adam, as dense",
]


OVER_TORCH = "3 ranks of torch.distributed"
JOBS = {"3 ranks": (3, "torch"), OVER_TORCH: (3, "torch.distributed")}
# What rows do has nothing to do with the wire; but these differ in who has rows when, and in what order.
EXACT_OVER_TORCH = ["bsp", "static, one rank without data", "every round another", "sparse adam, as dense"]


@pytest.fixture(scope="module", params=list(JOBS))
def outcome(request, pool):
    """What rank 0 answers."""
    with pool("torch_sparse.py", *JOBS[request.param]) as ranks:
        yield ranks[0]


class Exactness:
    def test_sparse_gradients_are_those_of_the_single_process_clipped_and_accumulated(self, outcome, case):
        assert outcome[case]["difference"] <= 1e-10
        assert outcome[case]["between_ranks"] == 0.0


@pytest.mark.parametrize("outcome", ["3 ranks"], indirect=True, scope="module")
@pytest.mark.parametrize("case", EXACT)
class TestOverHorovod(Exactness):
    pass


@pytest.mark.parametrize("outcome", [OVER_TORCH], indirect=True, scope="module")
@pytest.mark.parametrize("case", EXACT_OVER_TORCH)
class TestOverTorch(Exactness):
    pass


@pytest.mark.parametrize("case", ["bsp", "static, one rank without data"])
def test_gradients_stay_sparse_on_ranks_without_rows_too(outcome, case):
    assert outcome[case]["layouts"] == [[True, True, False, False]]
    assert (outcome[case]["idle"][0] == outcome[case]["rounds"]) == (case != "bsp"), "one rank never had data"


def test_sparse_as_dense_gives_dense_gradients_and_the_same_training(outcome):
    assert outcome["as dense"]["layouts"] == [[False, False, False, False]]
    assert outcome["as dense"]["difference"] <= 1e-10


def test_local_updates_and_neighbour_averaging_train_embeddings_too(outcome):
    assert outcome["local"]["between_ranks"] == 0.0
    for name in ("local", "d-psgd"):
        assert outcome[name]["finite"]
        assert outcome[name]["loss"] < 0.9 * outcome[name]["loss before"], name


def test_a_layout_that_changes_after_the_first_round_is_converted(outcome):
    assert outcome["changing"]["difference"] < 1e-15


def test_unlike_layouts_on_the_ranks_are_refused_on_all(outcome):
    assert "'group0.0' is sparse on one rank and dense on another" in outcome["mixed"]
    assert "sparse_as_dense=True" in outcome["mixed"]
