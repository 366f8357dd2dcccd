"""What a rank tells of its speed is believed only where it can be: NaN, zero, infinity, a thousand times too much."""

from __future__ import annotations

import itertools
import logging
import math

import numpy as np
import pytest
from tables import table

from hvd_hetero.balancer import Balancer
from hvd_hetero.measurement.plausibility import Plausibility
from hvd_hetero.policies import LBBSP, ElasticBSP
from hvd_hetero.rounds import MicroBatch

SPEEDS = [300.0, 100.0, 200.0]
LIES = [math.nan, 0.0, -5.0, math.inf, 1e5, 1e300]


class Job:
    """Ranks of given speeds; each clock is its own, and jumps where a test says so."""

    def __init__(self, policy, global_batch=60) -> None:
        self.clocks = [[100.0] for _ in SPEEDS]
        self.balancers = [
            Balancer(policy(), rank, len(SPEEDS), global_batch, clock=lambda clock=clock: clock[0])
            for rank, clock in enumerate(self.clocks)
        ]
        self.speeds = list(SPEEDS)

    def rounds(self, count, lie=None, jump_s=0.0):
        """Rank 1 says what it should not, or its clock jumps in the middle of the round."""
        for _ in range(count):
            rows = []
            for rank, (balancer, clock) in enumerate(zip(self.balancers, self.clocks, strict=True)):
                plan = balancer.plan()
                sizes = plan.sizes(rank)
                for i, size in enumerate(sizes, start=1):
                    balancer.begin(MicroBatch(plan, size, i == len(sizes)))
                    clock[0] += size / self.speeds[rank] + (jump_s if rank == 1 and i == 1 else 0.0)
                    if i < len(sizes):
                        balancer.pause()
                if rank == 1 and lie is not None:
                    truth = balancer.meter.row
                    balancer.meter.row = lambda truth=truth: truth() | {"samples_per_s": lie}
                    rows.append(balancer.report())
                    balancer.meter.row = truth
                else:
                    rows.append(balancer.report())
            for balancer in self.balancers:
                balancer.agree(sum(rows))
        return self.balancers[0].plan()


@pytest.mark.parametrize("lie", LIES, ids=str)
@pytest.mark.parametrize("policy", [LBBSP, ElasticBSP])
def test_a_rank_with_an_incredible_speed_keeps_its_share_and_the_log_says_so_once(policy, lie, caplog):
    """DESIGN, behaviour at the edges: a zero, negative, NaN or infinite speed; and one a thousand times too large."""
    job = Job(policy)
    before = job.rounds(20)
    assert job.rounds(5, lie=lie) == before
    assert {balancer.plan() for balancer in job.balancers} == {before}, "all ranks decide alike"
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1, "rank 0 says it, and not in every round"
    assert "round 20: rank 1 forecasts" in said[0].getMessage()
    assert job.rounds(3) == before
    assert "rank 1 forecasts a credible speed again" in caplog.records[-1].getMessage()


def test_ranks_without_a_measurement_yet_are_not_suspected(caplog):
    """DESIGN, behaviour at the edges: a rank with no measurement yet keeps its last plan."""
    job = Job(LBBSP)
    first = job.balancers[0].plan()
    job.rounds(1)
    assert job.balancers[0].plan().samples == first.samples
    assert not caplog.records


def test_the_others_go_on_dividing_the_rest():
    job = Job(LBBSP)
    share = job.rounds(20).samples[1]
    job.speeds[0] = 100.0
    plan = job.rounds(30, lie=math.nan)
    assert plan.samples[1] == share
    assert plan.samples[0] < plan.samples[2]


def test_a_rank_that_really_becomes_ten_times_faster_is_believed():
    job = Job(LBBSP)
    job.rounds(20)
    job.speeds[1] = 1000.0
    assert job.rounds(60).samples[1] == pytest.approx(60 * 1000 / 1500, abs=2)


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 0.0], ids=str)
def test_a_clock_that_jumps_costs_some_rounds_and_nothing_more(jump_s):
    """An hour forward or back within one round: the shares come back to what they were within 20 rounds."""
    job = Job(LBBSP)
    before = job.rounds(40).samples
    job.rounds(1, jump_s=jump_s)
    after = job.rounds(20).samples
    assert max(abs(a - b) for a, b in zip(after, before, strict=True)) <= 0.05 * 60


def test_a_clock_that_jumps_back_teaches_nothing():
    job = Job(lambda: LBBSP("ema"))
    before = job.rounds(40)
    assert job.rounds(1, jump_s=-3600.0) == before


def alone(samples, seconds, speed):
    """One rank: what it did, and what it says that it will do."""
    return table(1, samples=samples, compute_s=seconds, samples_per_s=speed)


def test_a_short_round_among_the_first_makes_no_honest_rank_suspicious(caplog):
    """0.1 s of fixed cost: 300 samples/s in whole rounds, 10 in one of a single sample, which was held against it."""
    plausibility = Plausibility(1, 64.0)
    for number, samples in enumerate([60, 60, 1, 60, 60, 1, 60, 1]):
        told = alone(samples, 0.1 + samples / 600, 300.0)
        assert plausibility(number, told, short=samples == 1) is told
    assert not caplog.records


def test_the_warning_names_the_bound_and_never_a_figure_that_it_keeps_to(caplog):
    """After a short round that was fast it said: 900 samples/s, which cannot be (it has done 1000)."""
    plausibility = Plausibility(1, 64.0)
    for number in range(4):
        plausibility(number, alone(60, 0.3, 200.0))
    plausibility(4, alone(1, 0.001, 900.0), short=True)
    plausibility(5, alone(60, 0.3, math.nan))
    plausibility(6, alone(60, 0.3, 200.0))
    plausibility(7, alone(60, 0.3, -1.0))
    said = [record.getMessage() for record in caplog.records if "it keeps" in record.getMessage()]
    assert "900 samples/s, more than 4 times the 200 that it has kept up; it keeps" in said[0]
    assert "-1 samples/s, which is no speed; it keeps" in said[1]


def believed(tables, typical_size):
    """What the docstring of the module says, rank by rank: the speeds that are believed after each table."""
    workers, found = tables[0][0].workers, []
    kept_up, measured, known, doubted = [[] for _ in range(workers)], [0] * workers, [False] * workers, set()
    for told, short in tables:
        speeds = told.figures("samples_per_s")
        for rank, v in enumerate(speeds):
            x, k, fixed = (told.figures(name)[rank] for name in ("samples", "micro_batches", "fixed_samples"))
            busy_s = float(told.busy_s[rank])
            if not short and x > 0 and 0 < busy_s < math.inf:
                kept_up[rank].append(x / busy_s * (1 + k * fixed / x) / (1 + fixed / typical_size))
                measured[rank] += 1
            pairs = itertools.pairwise(kept_up[rank])
            bound = 4 * max(list(map(min, pairs))[1:]) if measured[rank] > 2 else math.inf
            if 0 < v < math.inf and v <= bound:
                known[rank] = True
                doubted.discard(rank)
            elif known[rank] or not math.isnan(v):
                doubted.add(rank)
        found.append([math.nan if rank in doubted else v for rank, v in enumerate(speeds)])
    return found


@pytest.mark.parametrize("seed", range(8))
def test_of_many_ranks_each_is_believed_as_if_it_were_alone(seed):
    """Strange clocks, strange speeds, ranks without samples and short rounds, against the definition."""
    rng = np.random.default_rng(seed)
    workers, tables = 9, []
    paces, fixed = rng.uniform(10, 1000, workers), rng.choice([0.0, 20.0], workers)
    for _ in range(40):
        short = rng.random() < 0.2
        samples = rng.integers(0, 3 if short else 100, workers)
        busy_s = (samples + fixed) / paces * rng.lognormal(0, 0.1, workers)
        strange = rng.random(workers) < 0.2
        busy_s[strange] = rng.choice([math.nan, 0.0, -1.0, math.inf, 1e-5], strange.sum())
        speeds = paces * rng.lognormal(0, 0.7, workers)
        strange = rng.random(workers) < 0.2
        speeds[strange] = rng.choice([math.nan, 0.0, -1.0, math.inf, 1e5, 1e300], strange.sum())
        did = {"samples": samples, "micro_batches": samples > 0, "compute_s": busy_s}
        tables.append((table(workers, samples_per_s=speeds, fixed_samples=fixed, **did), short))
    plausibility = Plausibility(workers, 64.0, logs=False)
    found = [plausibility(i, told, short=short).figures("samples_per_s") for i, (told, short) in enumerate(tables)]
    assert np.array_equal(found, believed(tables, 64.0), equal_nan=True)
    assert np.isnan(found).any(), "some are doubted"
