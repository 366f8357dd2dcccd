"""On Keras, too, the gradient is exact: whatever the split, training is that of one process on the same batches."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed
ONE, SEVERAL = "every round another", "every round another, in micro-batches"
IDLE, MANY = "static, one rank without data", f"{SEVERAL}, adamw"
EPOCHS = 2
PER_EPOCH = {2: 9, 3: 8}  # rounds, by ranks: the last one is short, or has two samples more, too few for three ranks
# A round is one micro-batch, whose loss is weighted, or several, whose gradients are gathered. Each has splits of any
# kind, so which policy has made them does not matter.
CASES = ["bsp", IDLE, ONE, MANY, f"{ONE}, adamw, float32"]
KERAS_3, TF_KERAS = ("Keras 3", 2), ("tf_keras", 3)
# On tf_keras one case of each way that gradients take to the update; what a plan is, no version of Keras knows.
OF_TF_KERAS = ["bsp", ONE, MANY]


def label(job):
    return f"{job[0]}, {job[1]} ranks"


@pytest.fixture(scope="module")
def ranks(request, pool):
    framework, number = request.param
    with pool("keras_exactness.py", number, framework, ["optimised graphs"] * (framework == "Keras 3")) as ranks:
        yield ranks


class Exactness:
    def test_weights_after_all_rounds_are_those_of_the_single_process(self, ranks, case):
        outcome = ranks[0][case]
        assert len(outcome["rounds"]) == EPOCHS * PER_EPOCH[len(ranks)]
        assert outcome["difference"] <= (1e-5 if "float32" in case else 1e-10)
        assert outcome["moved"] > 1e-2, "training did change the weights"

    def test_all_ranks_hold_the_same_bits_and_the_same_loss(self, ranks, case):
        assert ranks[0][case]["between_ranks"] == 0.0
        assert ranks[0][case]["loss_between_ranks"] == 0.0

    def test_every_policy_visits_the_same_samples_in_the_same_rounds(self, ranks, case):
        assert ranks[0][case]["rounds"] == ranks[0]["bsp"]["rounds"]

    def test_each_sample_of_an_epoch_is_visited_exactly_once(self, ranks, case):
        rounds, per_epoch = ranks[0][case]["rounds"], PER_EPOCH[len(ranks)]
        for begin in range(0, len(rounds), per_epoch):
            epoch = rounds[begin : begin + per_epoch]
            assert sorted(i for r in epoch for i in r) == list(range(ranks[0][case]["samples"]))
            assert len(epoch[-1]) == {2: 2, 3: 14}[len(ranks)]

    def test_the_loss_was_weighted_where_it_can_be_and_gradients_elsewhere(self, ranks, case):
        assert ranks[0][case]["weighs_the_loss"] == (case not in (IDLE, MANY))


@pytest.mark.parametrize("ranks", [KERAS_3], ids=label, indirect=True, scope="module")
@pytest.mark.parametrize("case", CASES)
class TestOnKeras3(Exactness):
    pass


@pytest.mark.parametrize("ranks", [TF_KERAS], ids=label, indirect=True, scope="module")
@pytest.mark.parametrize("case", OF_TF_KERAS)
class TestOnTfKeras(Exactness):
    pass


@pytest.mark.parametrize("ranks", [KERAS_3], ids=label, indirect=True)
def test_the_hard_cases_did_occur(ranks):
    """Rounds without data for a rank, and micro-batches of different sizes, were among those compared."""
    assert ranks[0][IDLE]["idle"][0] == EPOCHS * PER_EPOCH[len(ranks)]
    for policy in (ONE, MANY):
        assert sum(ranks[0][policy]["idle"]) > 0
        assert all(len(sizes) > 2 for sizes in ranks[0][policy]["sizes"])
