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


def test_equal_losses_are_said_to_be_equal(demo_data):
    same, told = demo_data.judge({"BSP": 0.021, "LB-BSP": 0.0212, "oracle": 0.0209}, demo_data.ROUNDS, BATCH)
    assert same
    assert told.startswith("The final losses are 0.0003 apart")
    assert "2.30" in told


@pytest.mark.parametrize("odd", [2.303, math.nan])
def test_a_training_that_ends_elsewhere_fails_the_demo(demo_data, odd):
    for name in ("BSP", "LB-BSP", "oracle"):
        losses = dict.fromkeys(("BSP", "LB-BSP", "oracle"), 0.02) | {name: odd}
        same, told = demo_data.judge(losses, demo_data.ROUNDS, BATCH)
        assert not same
        assert told.startswith("The final losses differ: ")
        assert f"{name} {odd:.3f}" in told


def test_three_trainings_that_all_fail_are_no_success(demo_data):
    losses = dict.fromkeys(("BSP", "LB-BSP", "oracle"), 2.303)
    assert not demo_data.judge(losses, demo_data.ROUNDS, BATCH)[0]
    assert demo_data.judge(losses, 25, BATCH)[0], "25 rounds are too few to learn in"


def test_a_short_training_must_have_begun_to_learn(demo_data):
    names = ("BSP", "LB-BSP", "oracle")
    for loss, learns in ((2.05, True), (2.29, False)):
        same, told = demo_data.judge(dict.fromkeys(names, loss), demo_data.LEAST_ROUNDS, BATCH)
        assert same == learns
        assert ("has not learnt" in told) != learns


@pytest.mark.parametrize(("round_s", "rounds"), [(0.01, 120), (0.3, 85), (0.6, 42), (5.0, 30)])
def test_trainings_have_as_many_rounds_as_a_minute_allows(demo_data, round_s, rounds):
    """One of BSP, and two that take two thirds as long, at half speed."""
    assert demo_data.affordable_rounds(round_s, slow=2.0) == rounds
