"""The batch as large as pays: gains, sizes, and choices that are seldom and near the best."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from tables import table

from hvd_hetero.measurement.gradient_noise import GradientNoise, Noise
from hvd_hetero.policies import BSP, LBBSP, NonBlocking, StaticAllocation
from hvd_hetero.policies.goodput import Goodput, gain, round_s, sizes
from hvd_hetero.rounds import RoundPlan


def noise(scale, rounds=100):
    """Return noise of this scale, which is well known."""
    known = GradientNoise()
    for _ in range(rounds):
        known.learn(Noise(scale, 1.0))
    return known


def test_the_gain_is_one_at_the_start_and_grows_to_what_the_noise_allows():
    assert gain(64, 64, 500.0) == 1.0
    assert gain(256, 64, 500.0) == pytest.approx(256 / 64 * (500 + 64) / (500 + 256))
    assert gain(10**9, 64, 500.0) == pytest.approx(1 + 500 / 64, rel=1e-5)
    assert gain(256, 64, math.inf) == 4.0
    assert gain(32, 64, 500.0) < 1.0


@pytest.mark.parametrize(
    ("least", "start", "most", "multiple_of"), [(1, 1, 1, 1), (48, 100, 5000, 1), (64, 320, 2048, 32)]
)
def test_sizes_are_multiples_close_enough_together(least, start, most, multiple_of):
    found = sizes(least, start, most, multiple_of)
    assert start in found
    assert least <= found[0]
    assert found[-1] <= most
    assert all(size % multiple_of == 0 for size in found)
    assert all(b / a <= 1.5 for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("scale", [40.0, 700.0, 2e4])
@pytest.mark.parametrize("fixed_s", [0.0, 0.02, 0.5])
def test_a_line_leads_to_nearly_the_best_of_all_batches(scale, fixed_s):
    chooser = Goodput(start=256, least=32, most=8192)
    chooser.begin(BSP(), 4)

    def seconds(total):
        return fixed_s + total / 2000.0

    total, moves = 256, []
    for _ in range(20):
        other = chooser.chosen(total, (scale, scale), seconds)
        moves.append(other / total)
        total = other
    rates = [gain(b, 256, scale) / seconds(b) for b in range(32, 8193)]
    assert gain(total, 256, scale) / seconds(total) > 0.96 * max(rates)
    assert max(moves) <= 2
    assert moves[-1] == 1.0, "it comes to rest"


def test_a_move_must_pay_at_both_ends_of_the_interval():
    chooser = Goodput(start=256, least=32, most=8192)
    chooser.begin(BSP(), 4)
    seconds = {total: 0.05 + total / 2000.0 for total in sizes(32, 256, 8192)}.__getitem__
    assert chooser.chosen(256, (5e3, math.inf), seconds) > 256
    assert chooser.chosen(256, (1.0, 5.0), seconds) < 256
    assert chooser.chosen(256, (1.0, math.inf), seconds) == 256
    assert chooser.chosen(256, (5e3, 5e3), lambda total: math.nan) == 256


COSTS = {"samples_per_s": [400.0, 100.0], "fixed_samples": [10.0, 30.0]}


def test_the_round_of_a_policy_that_goes_by_costs_is_the_best_split():
    plan, typical = LBBSP().first(2, 200), 100.0
    pace = [400.0 * (1 + 10 / typical), 100.0 * (1 + 30 / typical)]
    best = min(max((x + 10) / pace[0], (200 - x + 30) / pace[1]) for x in np.linspace(1, 199, 10_000))
    assert round_s(LBBSP(), plan, table(2, **COSTS), typical) == pytest.approx(best, rel=1e-3)
    assert round_s(BSP(), plan, table(2, **COSTS), typical) == pytest.approx(1.0)


def test_before_fixed_costs_are_known_half_of_the_first_batch_is_taken_to_be_fixed():
    speeds = table(2, samples_per_s=[100.0, 100.0])
    seconds = [round_s(BSP(), BSP().first(2, total), speeds, 50.0) for total in (100, 200)]
    assert seconds == pytest.approx([0.5, 0.75])
    unknown = table(2, samples_per_s=[100.0, math.nan])
    assert math.isnan(round_s(BSP(), BSP().first(2, 100), unknown, 50.0))


def reconsidered(chooser, plan, rounds, scale=2000.0):
    """Return the totals of so many rounds at these costs."""
    known, totals = noise(scale), []
    figures = table(2, wait_s=[0.1, 0.3], **COSTS)
    for _ in range(rounds):
        plan = chooser.reconsider(LBBSP(), plan, figures, known, 64.0)
        totals.append(plan.total)
    return totals, plan


def test_the_batch_moves_seldom_and_two_ranks_alike():
    ours, theirs = (Goodput(start=128, least=16, most=4096) for _ in range(2))
    for chooser in (ours, theirs):
        chooser.begin(LBBSP(), 2)
    totals, plan = reconsidered(ours, LBBSP().first(2, 128), 200)
    assert totals[:15] == [128] * 15
    assert 2 <= sum(a != b for a, b in itertools.pairwise(totals)) <= 6
    assert totals[-1] > 128
    assert reconsidered(theirs, LBBSP().first(2, 128), 200) == (totals, plan)


def test_micro_batches_of_a_larger_batch_fit_into_memory():
    chooser = Goodput(start=128, least=16, most=4096)
    chooser.begin(LBBSP(), 2)
    plan, figures = LBBSP().first(2, 128), table(2, wait_s=[0.5, 0.5], limit=[0.0, 70.0], **COSTS)
    for _ in range(200):
        plan = chooser.reconsider(LBBSP(), plan, figures, noise(1e5), 64.0)
    assert plan.total > 256
    assert max(plan.sizes(1)) <= 70
    assert plan.micro_batches[0] == 1


def test_a_saved_choice_goes_on():
    chooser, resumed = (Goodput(start=128, least=16, most=4096) for _ in range(2))
    for each in (chooser, resumed):
        each.begin(LBBSP(), 2)
    plan = reconsidered(chooser, LBBSP().first(2, 128), 40)[1]
    chooser.advance(plan.total, noise(2000.0))
    resumed.load_state_dict(chooser.state_dict())
    assert resumed.progress == chooser.progress > 1.0
    assert reconsidered(resumed, plan, 60) == reconsidered(chooser, plan, 60)


@pytest.mark.parametrize(("rule", "power"), [("adascale", 1.0), ("square-root", 0.5), ("constant", 0.0)])
def test_the_learning_rate_follows_as_asked_and_progress_whatever_was_asked(rule, power):
    chooser = Goodput(start=128, least=16, most=4096, learning_rate=rule)
    worth = gain(512, 128, 300.0)
    assert chooser.advance(512, noise(300.0)) == pytest.approx(worth**power)
    assert chooser.advance(128, GradientNoise()) == 1.0
    assert chooser.progress == pytest.approx(worth + 1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"start": 256, "least": 512, "most": 1024}, "start must be between"),
        ({"start": 256, "least": 64, "most": 32}, "start must be between"),
        ({"start": 256, "least": 0, "most": 512}, "least must be at least 1"),
        ({"start": 256, "least": 64, "most": 512, "learning_rate": "linear"}, "learning_rate must be one of"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Goodput(**given)


@pytest.mark.parametrize(
    ("policy", "least", "message"),
    [
        (NonBlocking(4), 64, "decides more"),
        (LBBSP(minimum=32), 64, "global_batch must be at least 128"),
        (StaticAllocation([30, 30, 30, 30]), 64, "at least the sum of the weights"),
    ],
)
def test_sizes_that_a_policy_cannot_divide_are_refused(policy, least, message):
    with pytest.raises(ValueError, match=message):
        Goodput(start=256, least=least, most=512).begin(policy, 4)


def test_a_policy_keeps_its_proportions_when_the_batch_moves():
    policy = LBBSP(multiple_of=8)
    policy.first(3, 240)
    assert policy.resized(RoundPlan.of([120, 80, 40]), 480).samples == (240, 160, 80)
    static = StaticAllocation([1, 3])
    assert static.resized(static.first(2, 80), 160) == RoundPlan((40, 120), (1, 3))
