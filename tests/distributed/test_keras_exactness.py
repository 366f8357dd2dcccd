"""On Keras, too, the gradient is exact: whatever the split, training is that of one process on the same batches.

And every kind of round trains as its recurrence says, and visits every sample once. Self-adaptive rounds are compared
with one process in test_keras_elastic.py.
"""

from __future__ import annotations

import pytest
from keras_frameworks import KERAS_3, by_framework

pytestmark = pytest.mark.distributed
ONE, SEVERAL = "every round another", "every round another, in micro-batches"
IDLE, MANY = "static, one rank without data", f"{SEVERAL}, adamw"
EPOCHS, PER_EPOCH, LAST = 2, 8, 14  # rounds; the last one has two samples more, too few for three ranks
# A round is one micro-batch, whose loss is weighted, or several, whose gradients are gathered. Each has splits of any
# kind, so which policy has made them does not matter.
CASES = ["bsp", IDLE, ONE, MANY, f"{ONE}, adamw, float32"]
# On tf_keras one case of each way that gradients take to the update; what a plan is, no version of Keras knows.
OF_TF_KERAS = ["bsp", ONE, MANY]
NEIGHBOURS = ["d-psgd, every round another", "non-blocking, matcha"]
TOGETHER = ["lb-non-blocking", "elastic-bsp, local"]


@pytest.fixture(scope="module")
def outcomes(request, pool):
    with pool("keras_policies.py", 3, request.param, ["optimised graphs"] * (request.param == KERAS_3)) as ranks:
        yield ranks.ask


@by_framework(CASES, OF_TF_KERAS)
def test_training_is_that_of_one_process_on_the_same_batches(outcomes, case):
    outcome = outcomes(case)[0]
    assert outcome["difference"] <= (1e-5 if "float32" in case else 1e-10)
    assert outcome["moved"] > 1e-2, "training did change the weights"
    assert outcome["between_ranks"] == outcome["loss_between_ranks"] == 0.0, "the same bits"
    rounds = outcome["rounds"]
    assert rounds == outcomes("bsp")[0]["rounds"], "every policy visits the same samples in the same rounds"
    assert len(rounds) == EPOCHS * PER_EPOCH
    for begin in range(0, len(rounds), PER_EPOCH):
        epoch = rounds[begin : begin + PER_EPOCH]
        assert sorted(i for r in epoch for i in r) == list(range(outcome["samples"]))
        assert len(epoch[-1]) == LAST
    assert outcome["weighs_the_loss"] == (case not in (IDLE, MANY)), "where it can be, and gradients elsewhere"


@pytest.mark.parametrize("outcomes", [KERAS_3], indirect=True)
def test_the_hard_cases_did_occur(outcomes):
    """Rounds without data for a rank, and micro-batches of different sizes, were among those compared."""
    assert outcomes(IDLE)[0]["idle"][0] == EPOCHS * PER_EPOCH
    for policy in (ONE, MANY):
        assert sum(outcomes(policy)[0]["idle"]) > 0
        assert all(len(sizes) > 2 for sizes in outcomes(policy)[0]["sizes"])


# On tf_keras ranks that average with neighbours; gradients are above, local updates in test_keras_elastic.py.
@by_framework([*TOGETHER, *NEIGHBOURS], NEIGHBOURS[:1])
def test_every_kind_of_round_trains_as_its_recurrence_says(outcomes, case):
    ranks = outcomes(case)
    assert ranks[0]["difference"] < 1e-10
    assert (ranks[0]["apart"] > 1e-4) == (case in NEIGHBOURS), "these held different models, and others did not"
    for outcome in ranks:
        assert outcome["spread"] == 0.0
        assert outcome["moved"] > 1e-2
        assert outcome["rate"] == 0.05, "averages of state leave it alone"
        assert outcome["once"], "every sample, in an epoch"
    early = outcome["rounds"] > 18 and outcome["least"] < outcome["most"]  # more rounds than of whole ones
    assert early or "non-blocking" not in case
    assert outcome["most"] == 3 or not ("non-blocking" in case or "elastic" in case)
