"""Ranks that cost more than they give rest, and come back when they are worth their share."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvd_hetero.policies import LBBSP
from hvd_hetero.policies.resting import Resting
from hvd_hetero.tools.simulation import Availability, Cluster, Compute, Jitter, Worker, simulate

BATCH, ROUNDS = 64, 600


def cluster(speeds, *, fixed=0.0, seed=0, noise=0.02, shares=None):
    """Workers of so many samples a second, each of whose micro-batches takes as long as ``fixed`` samples besides."""
    made = []
    for i, speed in enumerate(speeds):
        availability = {} if shares is None or shares[i] is None else {"availability": shares[i]}
        variation = (Jitter(sigma=noise),) if noise else ()
        made.append(Worker(Compute(1 / speed, fixed / speed), variation=variation, **availability))
    return Cluster(tuple(made), seed=seed)


def pace(made, policy, count=ROUNDS):
    """Samples per second, without the rounds in which speeds are learned; and each worker's samples."""
    rounds = []
    done = simulate(
        made, policy, BATCH, count, observer=lambda finished: rounds.append(finished.table.column("samples"))
    )
    return done.rate(100), np.array(rounds)


@pytest.mark.parametrize(
    ("speeds", "fixed", "rest"),
    [
        ((1.0, 0.1), 0.0, 0),
        ((1.0, 0.1), 8.0, 1),  # (1 + 8) / 0.1 for its least share, 64 + 8 for all of it without
        ((1.0, 1.0, 0.01), 8.0, 1),
        ((1.0, 0.01, 0.01), 0.0, 2),  # of which either alone saves nothing
    ],
)
def test_no_rank_makes_a_round_longer_than_it_is_without_it(speeds, fixed, rest):
    resting, samples = pace(cluster(speeds, fixed=fixed), LBBSP(may_rest=True), 300)
    taking_part, _ = pace(cluster(speeds, fixed=fixed), LBBSP(), 300)
    fast = speeds[: len(speeds) - rest]
    without, _ = pace(cluster(fast, fixed=fixed), LBBSP(), 300)
    assert resting > 0.985 * max(taking_part, without), "a hundredth, and noise"
    assert ((samples == 0).mean(axis=0) > 0.5).tolist() == [False] * len(fast) + [True] * rest


def test_a_rank_that_becomes_fast_is_found_out_by_a_trial():
    slow_at_first = Availability(at_s=(0.0, 12_000.0), share=(0.015, 1.0), period_s=None)
    _, samples = pace(cluster((1.0, 1.0), shares=(None, slow_at_first)), LBBSP(may_rest=True))
    shares = samples[:, 1]
    assert (shares[60:100] == 0).mean() > 0.9
    assert shares[-20:].min() > 25


def test_decisions_go_on_from_a_state():
    speeds, fixed, idle = np.array([1.0, 0.01]), np.array([0.0, 0.1]), np.array([True, False])
    first, again = Resting(32.0, 1, 1), Resting(32.0, 1, 1)
    assert first.decide(BATCH, speeds, fixed, ~idle) == [1]
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    trials = 0
    for _ in range(800):
        assert first.decide(BATCH, speeds, fixed, idle) == again.decide(BATCH, speeds, fixed, idle) == [1]
        tried = first.due()
        assert again.due() == tried
        trials += tried is not None
    assert 1 <= trials <= 25
    assert first.decide(BATCH, np.ones(2), fixed, np.array([True, True])) == [], "measured anew, it is fast"


def test_of_several_ranks_one_is_tried_at_a_time():
    """Ranks that began to rest together are due together."""
    fast, slow = 2, 8
    made = cluster([1.0] * fast + [0.028] * slow, noise=0.01)
    _, samples = pace(made, LBBSP(may_rest=True))
    assert (samples >= 0).all()
    assert ((samples[:, fast:] > 0).sum(axis=1)[40:] <= 1).all()
    assert (samples[40:, fast:] > 0).any()


def test_devices_with_curves_need_all_shares():
    with pytest.raises(ValueError, match=r"may_rest.*device='cpu'"):
        LBBSP(may_rest=True, device="gpu")
