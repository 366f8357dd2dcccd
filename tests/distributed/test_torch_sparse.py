"""Sparse gradients: exact under every policy that averages gradients, whoever has rows and whoever has none."""

from __future__ import annotations

from pathlib import Path

import pytest
from limits import TORCH_S

from hvd_hetero.testing import launch

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "torch_sparse.py"


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def outcome(request):
    return launch(WORKER, request.param, timeout_s=TORCH_S).reports[0]


def test_sparse_gradients_are_those_of_the_single_process_clipped_and_accumulated(outcome):
    for case in outcome["cases"]:
        assert case["difference"] <= 1e-10, case["policy"]
        assert case["between_ranks"] == 0.0, case["policy"]
    assert any(case["idle"][0] == 100 for case in outcome["cases"]), "one rank never had data"


def test_gradients_stay_sparse_on_ranks_without_rows_too(outcome):
    assert outcome["cases"][0]["layouts"] == [[True, True, False, False]]
    without_data = outcome["cases"][4]
    assert without_data["idle"][0] == 100
    assert without_data["layouts"] == [[True, True, False, False]]


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
