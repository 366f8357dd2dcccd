"""Losses that do not divide by samples, and samples that cost unequally much, train in Keras as in one process."""

from __future__ import annotations

import math

import pytest

pytestmark = pytest.mark.distributed
WEIGHED = ["weight_of", "weight_of, micro-batches"]  # whose loss is NaN where a batch has no word
OUTPUTS = ["weight_of, outputs", "weight_of, outputs, micro-batches"]
COUNTED = ["masks", "ignored class", "sample weights and masks"]
PLAIN = ["sample weights", "class weights", "sum", "sum, micro-batches", "sum and mean"]
BY_COST = ["cost_of", "cost_of, micro-batches", "cost_of a stream", "cost_of a sequence"]
MASKED = ["masks, micro-batches", "masks, eagerly"]
CASES = [*WEIGHED, *OUTPUTS, *COUNTED, *MASKED, *PLAIN, *BY_COST]
# What depends on how its losses reduce, and on its own step.
OF_TF_KERAS = [*WEIGHED, *OUTPUTS, *COUNTED, *MASKED, *PLAIN, "cost_of, micro-batches"]
ADAPTING = ["adascale", "square-root, micro-batches", "adascale, a loop"]
OF_NOISE = ["noise, micro-batches", "noise of tokens"]
ROUNDS = {2: 18, 3: 16}
LONGEST = 5


def label(job):
    return f"{job[0]}, {job[1]} ranks"


@pytest.fixture(scope="module")
def ranks(request, pool):
    framework, number = request.param
    with pool("keras_weights.py", number, framework) as ranks:
        yield ranks


class Weights:
    def test_weights_are_those_of_one_process_and_alike_on_all_ranks(self, ranks, case):
        for rank in ranks:
            assert rank[case]["rounds"] == ROUNDS[len(ranks)]
            assert rank[case]["weights"] < 1e-10
            assert rank[case]["spread"] == 0.0
            assert rank[case]["moved"] > 1e-2, "training did change the weights"
        assert ranks[0][case]["splits"] > 1, "of which rank 0 hears"

    def test_figures_are_those_of_one_process(self, ranks, case):
        """Not the loss where batches of NaN count, nor in an eager step, whose updates are not seen."""
        history = dict(ranks[0][case]["history"])
        if case in [*WEIGHED, *BY_COST, "masks, eagerly"]:
            del history["loss"]
        assert all(apart < 1e-10 for apart in history.values()), history


@pytest.mark.parametrize("ranks", [("Keras 3", 2)], ids=label, indirect=True, scope="module")
@pytest.mark.parametrize("case", CASES)
class TestOnKeras3(Weights):
    pass


@pytest.mark.parametrize("ranks", [("tf_keras", 3)], ids=label, indirect=True, scope="module")
@pytest.mark.parametrize("case", OF_TF_KERAS)
class TestOnTfKeras(Weights):
    pass


@pytest.mark.parametrize("ranks", [("Keras 3", 2)], ids=label, indirect=True)
def test_a_loop_of_ones_own_weighs_as_well(ranks):
    for rank in ranks:
        outcome = rank["weight_of, a loop"]
        assert outcome["rounds"] == ROUNDS[2]
        assert outcome["weights"] < 1e-10
        assert outcome["spread"] == 0.0


@pytest.mark.parametrize("ranks", [("Keras 3", 2)], ids=label, indirect=True)
def test_micro_batches_keep_to_their_cost(ranks):
    for rank in ranks:
        assert rank["cost_of, micro-batches"]["largest"] <= 2 * LONGEST
        assert rank["cost_of, micro-batches"]["batches"] > ROUNDS[2], "rounds had several"
        assert rank["cost_of"]["largest"] > 2 * LONGEST, "there was something to keep to"


@pytest.mark.parametrize("ranks", [("Keras 3", 2), ("tf_keras", 3)], ids=label, indirect=True, scope="module")
class TestNoise:
    @pytest.mark.parametrize("case", [*ADAPTING, *OF_NOISE])
    def test_weights_and_noise_scales_are_those_of_one_process(self, ranks, case):
        for rank in ranks:
            assert rank[case]["weights"] < 1e-10
            assert rank[case]["spread"] == 0.0
            assert rank[case]["moved"] > 1e-2, "training did change the weights"
        found, wanted = ranks[0][case]["scales"]
        assert len(found) == len(wanted) == ranks[0][case]["rounds"]
        for scale, other in zip(found, wanted, strict=True):
            assert scale == (None if other in (None, math.inf) else pytest.approx(other, rel=1e-8))
        assert sum(scale is not None for scale in found) > 2

    @pytest.mark.parametrize("case", ADAPTING)
    def test_a_batch_that_adapts_changes_the_update_and_nothing_else(self, ranks, case):
        for rank in ranks:
            assert len(rank[case]["batches"]) >= 4
            assert rank[case]["epochs of each sample once"] == rank[case]["epochs"] == 2
            found, wanted = rank[case]["progress"]
            assert found == pytest.approx(wanted, rel=1e-9)
            assert found != rank[case]["rounds"]
            assert rank[case]["rates"] == ([0.05] if "loop" in case else [0.05, 0.025]), "as users set them"
