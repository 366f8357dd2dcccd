"""What Horovod's tests ask of its PyTorch optimizer holds of this one, which takes its place."""

from __future__ import annotations

import re

import pytest
from limits import TORCH_S

from hvd_hetero.testing import RankError

pytestmark = pytest.mark.distributed


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
    for scenario in (
        "state_is_broadcast_for_every_optimizer", "horovods_broadcasts_work_after_wrapping",
        "options_are_broadcast_for_every_optimizer",
    ):  # fmt: skip
        assert set(outcome[scenario]) == set(outcome["optimizers"])


@on_two_ranks
def test_a_checkpoint_that_rank_0_has_loaded_reaches_fresh_optimizers(ranks):
    for rank in ranks:
        for name, case in rank["state_is_broadcast_for_every_optimizer"].items():
            assert case["lost"] == 0.0, name
            assert case["entries"] > 0, name
            assert case["parameters apart"] == case["state apart"] == 0.0, name


@on_two_ranks
def test_horovods_broadcasts_after_wrapping_bring_what_rank_0_has_loaded_and_change_nothing_else(ranks):
    for rank in ranks:
        for name, case in rank["horovods_broadcasts_work_after_wrapping"].items():
            assert case == {"with nothing to load": 0.0, "lost": 0.0, "hooks": 0, "apart": 0.0}, name


@on_two_ranks
def test_options_become_those_of_rank_0_with_their_types(ranks):
    for rank in ranks:
        for name, case in rank["options_are_broadcast_for_every_optimizer"].items():
            assert case == {"same": True, "parameters apart": 0.0}, name


@on_two_ranks
def test_parameters_that_are_not_trained_are_broadcast_too(ranks):
    for rank in ranks:
        assert rank["parameters_without_gradients_are_broadcast"] == {
            "which": [1, 3], "dtype": "torch.int64", "apart": 0.0,
        }  # fmt: skip


@on_two_ranks
def test_several_optimizers_in_one_job_do_not_meet(outcome):
    case = outcome["state_with_several_optimizers"]
    assert case == {"parameters apart": 0.0, "state apart": 0.0, "entries": [16, 4], "steps": 4.0}


def test_gradients_are_exchanged_though_a_rank_does_not_have_them(outcome):
    cases = outcome["gradients_are_exchanged_though_ranks_use_other_layers"]
    assert len(cases) >= 10
    for name, case in cases.items():
        assert case["moved"] > 1e-5, f"{name}: some parameter was trained on no rank"
        assert case["apart"] == 0.0, name


def test_the_difference_between_ranks_stays_zero(outcome):
    assert outcome["ranks_do_not_drift"] == {"parameters apart": 0.0, "state apart": 0.0}


@on_two_ranks
def test_names_must_be_unique_and_complete_or_are_made(outcome):
    case = outcome["names"]
    assert re.match("ValueError: names in named_parameters must be unique, repeated: bias, weight", case["duplicate"])
    assert re.match("ValueError: named_parameters must name every parameter", case["missing"])
    assert re.match("ValueError: named_parameters must be pairs", case["not pairs"])
    assert case["unique"]
    assert case["same everywhere"]
    assert case["nameless apart"] == case["groups apart"] == 0.0
    assert case["rates"] == [0.1, 0.01]


@on_two_ranks
def test_gradients_can_be_turned_off_and_on(outcome):
    assert outcome["gradients_are_turned_off_and_on"] == {"only the active one": True, "apart": 0.0}


@on_two_ranks
def test_the_gradient_of_all_ranks_is_clipped(outcome):
    case = outcome["clipping"]
    assert case["ready"]
    assert not case["again"]
    assert case["before"] == pytest.approx(case["expected"])
    assert 0 < case["after"] < 0.1 < case["before"]
    assert case["moved"] == pytest.approx(0.1 * case["after"], rel=1e-4)


def test_step_after_synchronize_uses_the_sums_as_they_are(outcome):
    # With three ranks the order of a sum follows what was fused with it.
    assert outcome["a_step_after_synchronize_does_not_synchronise_twice"]["difference"] < 1e-7


@on_two_ranks
def test_several_backward_passes_make_one_update(outcome):
    case = outcome["several_backward_passes_per_step"]
    assert case["difference"] < 1e-14
    assert case["calls"] == 3 * case["rounds"] == 9


def test_the_mean_of_large_gradients_does_not_overflow_in_16_bits(outcome):
    assert outcome["the_mean_does_not_overflow"]["gradient"] == pytest.approx(60000.0, rel=1e-3)


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.float64"])
def test_compression_gives_back_the_type_and_nearly_the_value(outcome, dtype):
    case = outcome["compression"][dtype]
    assert case["dtype"] == dtype
    assert 0 < case["off"] < 1e-3


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
def test_gradients_are_cleared_to_none_or_to_zero(outcome):
    case = outcome["zero_grad_in_both_ways"]
    assert case["True"]["left"] == [None] * 4
    assert case["False"]["left"] == [0.0] * 4
    assert case["True"]["end"] == case["False"]["end"]


@pytest.mark.parametrize("wire", ["torch", "torch.distributed"])
def test_a_rank_that_leaves_ends_the_job_and_nobody_waits_for_ever(launch, wire):
    with pytest.raises(RankError) as failure:
        launch("torch_conformance.py", 2, ["leave"], framework=wire, timeout_s=TORCH_S)
    assert next(iter(failure.value.exit_codes.items())) == (1, 7)
    assert failure.value.result.reports == (3, 3)
