"""The demo's three trainings see the same samples in the same order, and say so if they end at different losses."""

import math
from argparse import Namespace

import pytest
from script_modules import load

from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.rounds import RoundPlan

ROUNDS, BATCH = 47, 128


@pytest.fixture(scope="module")
def demo_data():
    return load("demo_data", "examples")


@pytest.mark.parametrize("batch", [BATCH, 100])
def test_the_oracle_sees_the_samples_of_the_others_in_their_order(demo_data, batch):
    options = Namespace(rounds=ROUNDS, global_batch=batch)
    shares = [batch - 40, 40]
    ranks = [demo_data.hand_set_batches(options, shares, rank) for rank in range(2)]
    assert [len(lists) for lists in ranks] == [ROUNDS, ROUNDS]
    length = demo_data.training_samples(batch)
    assert length >= demo_data.TRAIN_SAMPLES
    epochs = [SharedPermutation(length, shuffle=True, seed=demo_data.SEED) for _ in range(3)]
    for number, order in enumerate(epochs):
        order.start(number)
    whole = [int(i) for order in epochs for i in order.take(RoundPlan.of([length]), 0).part]
    seen = [i for first, second in zip(*ranks, strict=True) for i in first + second]
    assert seen == whole[: ROUNDS * batch]


@pytest.mark.parametrize("odd", [2.303, math.nan])
def test_a_training_that_ends_elsewhere_fails_the_demo(demo_data, odd):
    for name in ("BSP", "LB-BSP", "oracle"):
        losses = dict.fromkeys(("BSP", "LB-BSP", "oracle"), 0.02) | {name: odd}
        same, told = demo_data.judge(losses, demo_data.ROUNDS, BATCH)
        assert not same
        assert told.startswith("The final losses differ: ")
        assert f"{name} {odd:.3f}" in told
