"""What Horovod's tests ask of its PyTorch optimizer holds of this one, which takes its place."""

from __future__ import annotations

import os

import pytest

from hvd_hetero.testing import RankError

pytestmark = pytest.mark.distributed
ON_DEVICE = os.environ.get("HVD_HETERO_TEST_DEVICE", "cpu") != "cpu"


OVER_TORCH = "3 ranks of torch.distributed"
JOBS = {"2 ranks": (2, "torch"), OVER_TORCH: (3, "torch.distributed")}


@pytest.fixture(scope="module", params=list(JOBS))
def ranks(request, pool):
    with pool("torch_conformance.py", *JOBS[request.param]) as ranks:
        yield ranks


@pytest.fixture
def outcome(ranks):
    return ranks[0]


# What a loop does with its optimizer has nothing to do with the wire and with how many ranks there are.
on_two_ranks = pytest.mark.parametrize("ranks", ["2 ranks"], indirect=True, scope="module")


@on_two_ranks
def test_every_optimizer_of_pytorch_is_tried(outcome):
    assert set(outcome["optimizers"]) >= {
        "ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    }  # fmt: skip
    for scenario in ("state, before wrapping", "state, after wrapping", "options_are_broadcast_for_every_optimizer"):
        assert set(outcome[scenario]) == set(outcome["optimizers"])


@on_two_ranks
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_checkpoint_that_rank_0_has_loaded_reaches_fresh_optimizers(ranks, moment):
    """Also by Horovod's broadcasts, once they are wrapped."""
    for rank in ranks:
        for name, case in rank[f"state, {moment} wrapping"].items():
            assert case == {"lost": 0.0, "hooks": 0, "apart": 0.0}, name


@on_two_ranks
def test_horovods_broadcasts_change_nothing_where_there_is_nothing_to_load(outcome):
    assert set(outcome["broadcasts_with_nothing_to_load"].values()) == {0.0}


@on_two_ranks
def test_options_become_those_of_rank_0_with_their_types(ranks):
    for rank in ranks:
        for name, case in rank["options_are_broadcast_for_every_optimizer"].items():
            assert case == {"same": True, "parameters apart": 0.0}, name


def test_gradients_are_exchanged_though_a_rank_does_not_have_them(outcome):
    cases = outcome["gradients_are_exchanged_though_ranks_use_other_layers"]
    assert len(cases) >= 10
    for name, case in cases.items():
        assert case["moved"] > 1e-5, f"{name}: some parameter was trained on no rank"
        assert case["apart"] == 0.0, name


@on_two_ranks
def test_names_are_made_alike_on_all_ranks(outcome):
    assert outcome["names"] == {"unique": True, "same everywhere": True, "apart": 0.0, "rates": [0.1, 0.01]}


@on_two_ranks
def test_the_gradient_of_all_ranks_is_clipped(outcome):
    case = outcome["clipping"]
    assert case["ready"]
    assert not case["again"]
    assert case["before"] == pytest.approx(case["expected"])
    assert 0 < case["after"] < 0.1 < case["before"]
    assert case["moved"] == pytest.approx(0.1 * case["after"], rel=1e-4)


def test_the_mean_of_large_gradients_does_not_overflow_in_16_bits(outcome):
    assert outcome["the_mean_does_not_overflow"]["gradient"] == pytest.approx(60000.0, rel=1e-3)


@pytest.mark.parametrize("as_dense", ["False", "True"])
def test_sparse_embeddings_get_the_rows_of_all_ranks(outcome, as_dense):
    case = outcome["sparse_embeddings"][as_dense]
    assert case["off"] < 1e-6
    assert case["apart"] == 0.0


def test_uneven_data_needs_no_join(outcome):
    case = outcome["uneven_data_needs_no_join"]
    assert case["counts"][-1][-1] == 0, "a rank had no data"
    assert case["difference"] < 1e-14
    assert case["apart"] == 0.0


@on_two_ranks
@pytest.mark.skipif(ON_DEVICE, reason="a device's own wait may use the processor")
def test_waiting_for_a_late_rank_does_not_use_the_processor(outcome):
    case = outcome["waiting_does_not_spin"]
    assert case["wall_s"] > 0.3
    assert case["used_s"] < 0.25 * case["wall_s"]


def test_a_rank_that_leaves_ends_the_job_and_nobody_waits_for_ever(ranks):
    """The last of all tests, because that ends it."""
    with pytest.raises(RankError) as failure:
        _ = ranks[0]["one_rank_leaves"]
    assert next(iter(failure.value.exit_codes.items())) == (len(ranks) - 1, 7)
    assert failure.value.result.reports == (3,) * len(ranks)
