"""Scripts of the shape of keras.io's and of Horovod's, ported: History and weights are those of one process."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.distributed
SCRIPTS = ["vae", "ddim", "distillation", "contrast", "tensorflow2_keras_mnist", "tensorflow2_mnist"]
# A train step of tf_keras's own shape, and compile with a stream of samples.
OF_TF_KERAS = ["distillation by train_step", "tensorflow2_keras_mnist"]


@pytest.fixture(scope="module", params=["Keras 3", "tf_keras"])
def outcomes(request, pool):
    """What each rank answers to a case."""
    with pool("keras_behaviour.py", 2, request.param) as ranks:
        yield ranks.ask


# What is of this package far more than of Keras.
once = pytest.mark.parametrize("outcomes", ["Keras 3"], indirect=True)


class Ported:
    def test_a_ported_script_gives_the_history_and_the_weights_of_one_process(self, outcomes, script):
        for result in outcomes(script):
            assert result["rounds"] == 14, "seven an epoch, the last one of two samples"
            assert result["weights"] < 1e-10
            assert result["spread"] == 0.0
            assert result["keys"][0] == result["keys"][1]
            assert max(result["history"].values()) < 1e-10, result["history"]


@pytest.mark.parametrize("outcomes", ["Keras 3"], indirect=True)
@pytest.mark.parametrize("script", SCRIPTS)
class TestOnKeras3(Ported):
    pass


@pytest.mark.parametrize("outcomes", ["tf_keras"], indirect=True)
@pytest.mark.parametrize("script", OF_TF_KERAS)
class TestOnTfKeras(Ported):
    pass


@once
def test_what_a_loop_of_ones_own_builds_or_adds_later_is_broadcast(outcomes):
    for rank in outcomes("what_a_loop_makes_later_is_rank_0s"):
        for when in ("built later", "added between epochs", "started again"):
            assert rank[when] == 0.0


@once
@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("added within one", r"ValueError: 2 of the 8 variables given have values of this rank's own.*between two bat"),
        ("never started", r"ValueError: 4 of the 4 variables given .*made after balance.start\(model, optimizer\)"),
        ("cannot be built", r"ValueError: model .*TypeError: .*needs a mask.*give it an Input, or call its parts on"),
    ],
)
def test_what_a_loop_cannot_broadcast_is_refused(outcomes, attempt, message):
    for rank in outcomes("what_a_loop_makes_later_is_rank_0s"):
        assert re.match(message, rank[attempt], re.DOTALL), rank[attempt]


def test_what_adapt_has_found_on_rank_0_counts_on_all_ranks(outcomes):
    zero, one = outcomes("what_adapt_has_found_is_rank_0s")
    assert zero["differed"] > 0.1, "each rank's own"
    for rank in (zero, one):
        assert rank["predictions"] == 0.0
        assert rank["bins"][0] == rank["bins"][1]
    for name in ("mean", "given"):
        assert zero[name][1] == zero[name][0] == one[name][1] != one[name][0]
    assert zero["rank 0's"] == pytest.approx(0.0, abs=1e-5)


def test_what_local_layers_have_found_stays_with_their_rank(outcomes):
    zero, one = (rank["local"] for rank in outcomes("what_adapt_has_found_is_rank_0s"))
    assert zero[0] == zero[1]
    assert one[0] == one[1]
    assert zero[0][0] != one[0][0]
    assert zero[0][1] != one[0][1]


def test_other_words_are_refused_on_all_ranks(outcomes):
    for rank in outcomes("what_adapt_has_found_is_rank_0s"):
        assert rank["same words"] == 0.0
        assert re.match(
            r"HeteroError: layer 'words' of rank 1 has another vocabulary than rank 0's.*layer.set_vocabulary\(hvd",
            rank["other words"],
        )
