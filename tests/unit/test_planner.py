"""From tables to plans: the lead, the limits, and what goes on after a change."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from tables import table

from hvd_hetero.errors import RoundStateError
from hvd_hetero.measurement.gradient_noise import GradientNoise
from hvd_hetero.planner import Planner
from hvd_hetero.policies import BSP, LBBSP, Goodput, NonBlocking
from hvd_hetero.rounds import LENGTHS, FinishedRound


def round_of(planner, speeds=(300.0, 100.0), **figures):
    """Let ranks do what was planned at these speeds."""
    plan = planner.plan()
    x = np.array(plan.samples)
    did = {"samples": x, "micro_batches": 1, "compute_s": x / speeds, "samples_per_s": speeds, "timed_samples": x}
    planner.learn(FinishedRound(planner.rounds, 0, plan, table(len(speeds), **did | figures), 1.0))


@pytest.mark.parametrize("rounds_ahead", [0, 1, 3])
def test_the_table_of_a_round_decides_the_plan_that_many_rounds_later(rounds_ahead):
    planner = Planner(LBBSP(), 2, 80)
    planner.set_rounds_ahead(rounds_ahead)
    round_of(planner)
    assert [planner.plan(ahead).samples for ahead in range(rounds_ahead + 1)] == [(40, 40)] * rounds_ahead + [(50, 30)]
    with pytest.raises(RoundStateError, match=f"{rounds_ahead} rounds ahead"):
        planner.plan(rounds_ahead + 1)


def test_a_limit_in_the_table_cuts_micro_batches_of_every_later_plan():
    planner = Planner(BSP(), 2, 80)
    round_of(planner, limit=[0, 15])
    assert planner.plan().samples == (40, 40)
    assert planner.plan().micro_batches == (1, 3)


def test_renegotiated_plans_fill_the_whole_lead_and_keep_to_limits():
    planner = Planner(LBBSP(), 2, 80)
    planner.set_rounds_ahead(2)
    state = {"rounds": 17, "fixed_costs": None, "rules": [LENGTHS], "noise": GradientNoise().state_dict()}
    planner.renegotiate(state, [300.0, 100.0], [25, 0])
    assert planner.rounds == 17
    assert {(planner.plan(a).samples, planner.plan(a).micro_batches) for a in range(3)} == {((60, 20), (3, 1))}


def test_a_state_goes_on_with_the_very_same_plans():
    planner, again = Planner(NonBlocking(4), 2, 80), Planner(NonBlocking(4), 2, 80)
    for each in (planner, again):
        each.set_rounds_ahead(1)
    round_of(planner)
    state = json.loads(json.dumps(planner.state_dict()))
    again.load_state_dict(state)
    assert again.state_dict() == planner.state_dict()
    assert state["anticipation"]["length_s"] > 0, "what is expected of the end of a round goes on, too"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Planner(BSP(), 2, 80), "'policy': 'bsp'"),
        (Planner(LBBSP(), 4, 80), "'workers': 4"),
        (Planner(LBBSP(), 2, 60), "'global_batch': 60"),
        (Planner(LBBSP(), 2, Goodput(start=80, least=40, most=160)), "'adapts': True"),
    ],
)
def test_a_state_of_another_training_is_refused_by_name(other, message):
    planner = Planner(LBBSP(), 2, 80)
    with pytest.raises(ValueError, match=message):
        planner.load_state_dict(other.state_dict())


def noisy_round(planner, scale=2000.0):
    """A round whose transfer takes a second, and whose gradients have this noise, as its ranks would see it."""
    plan = planner.plan()
    own = [1.0 + scale / x for x in plan.samples]
    round_of(
        planner, [300.0, 100.0, 200.0][: plan.workers], wait_s=[1.0] * plan.workers, gradient_samples=plan.samples,
        gradient_square=own, mean_square=[1.0 + scale / plan.total] * plan.workers,
    )  # fmt: skip


def test_a_batch_that_adapts_moves_for_later_rounds_and_survives_a_change_of_ranks():
    planners = [Planner(LBBSP(), 2, Goodput(start=80, least=20, most=640)) for _ in range(2)]
    for planner in planners:
        planner.set_rounds_ahead(1)
        for _ in range(80):
            noisy_round(planner)
    first, other = planners
    assert first.noise.scale == pytest.approx(2000.0)
    assert first.plan(1).total > 160
    assert [first.plan(ahead) for ahead in (0, 1)] == [other.plan(ahead) for ahead in (0, 1)]

    state = json.loads(json.dumps(first.state_dict()))
    three = Planner(LBBSP(), 3, Goodput(start=80, least=20, most=640))
    three.set_rounds_ahead(1)
    three.renegotiate(state, [300.0, 100.0, math.nan], [0, 0, 0])
    assert three.plan().total == first.plan(1).total
    assert three.noise.scale == first.noise.scale

    resumed = Planner(LBBSP(), 2, Goodput(start=80, least=20, most=640))
    resumed.set_rounds_ahead(1)
    resumed.load_state_dict(state)
    for planner in (first, resumed):
        for _ in range(200):
            noisy_round(planner, 20.0)
    assert first.plan(1).total < three.plan().total, "less noise, a smaller batch"
    assert resumed.state_dict() == first.state_dict()


def test_another_model_begins_with_the_first_batch_and_without_the_noise_and_progress_of_the_former():
    planner = Planner(LBBSP(), 2, Goodput(start=80, least=20, most=640))
    for _ in range(80):
        noisy_round(planner)
        planner.goodput.advance(planner.plan().total, planner.noise)
    fast, slow = planner.plan().samples
    assert fast + slow > 80
    planner.begin_anew()
    assert sum(planner.plan().samples) == 80
    assert planner.plan().samples[0] == pytest.approx(80 * fast / (fast + slow), abs=2), "the same machines"
    assert math.isnan(planner.noise.scale)
    assert planner.goodput.progress == 0.0
    assert planner.rounds == 80, "names on the wire and records go on"


def test_the_noise_is_measured_where_it_decides_nothing_and_epochs_correct_it():
    planner = Planner(BSP(), 2, 80)
    noisy_round(planner)
    assert planner.noise.scale == pytest.approx(2000.0)
    assert planner.plan().total == 80
    finite = Planner(BSP(), 2, 80)
    finite.epoch_samples = 800
    noisy_round(finite)
    assert finite.noise.scale == pytest.approx(2000.0 / (1.0 + 2000.0 / 800))
