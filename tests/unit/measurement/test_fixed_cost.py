"""The fixed cost of a micro-batch is found from batches that change, and from nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvd_hetero.columns import COLUMNS
from hvd_hetero.measurement.fixed_cost import FixedCosts, Pace
from hvd_hetero.rounds import RoundReport, RoundTable

REFERENCE = 64.0
SPLITS = np.array([(64, 64)] * 10 + [(84, 44)] * 10 + [(100, 28)] * 10 + [(84, 44)] * 10)


def table(sizes, seconds, **figures) -> RoundTable:
    """One micro-batch on each rank; ``figures``: one number for all ranks, or one for each."""
    rows = []
    for rank, (size, busy_s) in enumerate(zip(sizes, seconds, strict=True)):
        row = dict.fromkeys(COLUMNS, 0.0) | {"cpu": np.nan, "memory": np.nan}
        row |= {"samples": size, "timed_samples": size, "micro_batches": 1.0, "compute_s": busy_s}
        row |= {name: np.broadcast_to(of, len(sizes))[rank] for name, of in figures.items()}
        rows.append(RoundReport(**row).vector(rank, len(sizes)))
    with np.errstate(invalid="ignore"):
        return RoundTable(np.where(np.isnan(rows).any(axis=0), np.nan, np.sum(rows, axis=0)), len(sizes))


def fed(sizes, beta, noise: float = 0.0, seed: int = 0, slower=1.0, costs: FixedCosts | None = None) -> FixedCosts:
    """After rounds of these sizes (rounds × ranks), on ranks whose times scatter by ``noise``."""
    sizes = np.asarray(sizes, dtype=np.float64)
    costs = costs or FixedCosts(REFERENCE, sizes.shape[1])
    times = (
        1e-3
        * np.asarray(slower)
        * (sizes + beta)
        * np.exp(noise * np.random.default_rng(seed).standard_normal(sizes.shape))
    )
    for size, seconds in zip(sizes, times, strict=True):
        costs.learn(table(size, seconds))
    return costs


def of_share(share: float) -> float:
    return REFERENCE * share / (1 - share)


@pytest.mark.parametrize("share", [0.3, 0.9])
@pytest.mark.parametrize(("noise", "factor"), [(0.0, 1.2), (0.05, 2.0)])
def test_it_is_found_where_batches_change(share, noise, factor):
    """Also on ranks of unequal speed: the second takes three times as long for both parts."""
    found = np.array([fed(SPLITS, of_share(share), noise, seed, slower=[1.0, 3.0]).samples for seed in range(10)])
    middle = np.median(found, axis=0) / of_share(share)
    assert (middle < factor).all()
    assert (middle > 1 / factor).all()


def test_where_there_is_none_little_is_found():
    for seed in range(10):
        assert fed(SPLITS, 0.0, 0.02, seed).samples.max() < 0.15 * REFERENCE
    assert fed(SPLITS, 0.0).samples.max() < 0.05 * REFERENCE


def test_batches_that_stay_teach_nothing_whatever_happens_to_the_rank():
    slower = np.repeat([1.0, 5.0, 0.7], 10)[:, None]
    assert fed(np.full((30, 2), 64), 200.0, 0.02, slower=slower).samples.tolist() == [0.0, 0.0]


def test_a_slowdown_after_which_the_plan_takes_samples_away_is_no_fixed_cost():
    """The second rank takes twice as long from round 10 on, and a round later loses samples."""
    sizes = np.array([(64, 64)] * 11 + [(84, 44)] * 10)
    slower = np.where(np.arange(21)[:, None] < 10, 1.0, [1.0, 2.0])
    for beta in (0.0, 64.0):
        found, undisturbed = fed(sizes, beta, slower=slower).samples, fed(sizes, beta).samples
        assert found == pytest.approx(undisturbed, rel=0.25, abs=4.0)


def test_a_jump_of_speed_in_the_round_in_which_the_size_changes_teaches_nothing():
    sizes = np.array([(64, 64)] * 10 + [(96, 32)] * 10)
    slower = np.where(np.arange(20)[:, None] < 10, 1.0, 4.0)
    assert fed(sizes, 20.0, 0.01, slower=slower).samples.tolist() == [0.0, 0.0]


def test_a_stumble_in_the_round_before_the_size_changes_teaches_nothing():
    """It was the level before: a share that fell to 4 samples in a quarter of the time seemed to cost only samples."""
    sizes = np.array([(64, 64)] * 10 + [(124, 4)] * 10)
    slower = np.where(np.arange(20)[:, None] == 9, [1.0, 3.4], 1.0)
    assert fed(sizes, of_share(0.8), 0.02, slower=slower).samples == pytest.approx([of_share(0.8)] * 2, rel=0.4)


@pytest.mark.parametrize("driver", ["cpu", "memory"])
def test_rounds_with_other_drivers_are_no_evidence(driver):
    """A rank that foresees its pace by its CPU loses samples in the round in which it loses pace."""
    costs = FixedCosts(REFERENCE, 2)
    for sizes, slower, available in [((64, 64), 1.0, 1.0)] * 10 + [((96, 32), 1.4, 0.7)] * 10:
        costs.learn(table(sizes, np.multiply(sizes, [1e-3, 1e-3 * slower]), **{driver: [1.0, available]}))
    assert costs.samples.max() < 0.15 * REFERENCE


def test_short_rounds_are_enough():
    costs = FixedCosts(REFERENCE, 2)
    rng = np.random.default_rng(0)
    for _ in range(4):
        for size in [64] * 15 + [10]:
            times = 1e-3 * (size + 128.0) * np.exp(0.01 * rng.standard_normal(2))
            told = 0.0 if size == 10 else size
            costs.learn(table([size] * 2, times, timed_samples=told), short=size == 10)
    assert costs.samples == pytest.approx([128.0] * 2, rel=0.3)


def test_times_of_a_device_belong_to_the_round_before():
    """Its row names the micro-batches of this round, and the samples and seconds of the one before."""
    costs = FixedCosts(REFERENCE, 1)
    before = None
    for size, cuts in [(64, 1)] * 10 + [(64, 2)] * 10 + [(64, 1)] * 10:
        if before is not None:
            samples, of = before
            costs.learn(
                table([size], [1e-3 * (samples + of * 64.0)], timed_samples=samples, micro_batches=cuts, lap_s=0.2)
            )
        before = (size, cuts)
    assert costs.samples[0] == pytest.approx(64.0, rel=0.3)


@pytest.mark.parametrize("absurd", [np.nan, np.inf, -1.0, 0.0])
def test_a_time_that_cannot_be_true_teaches_nothing(absurd):
    """Nor does a rank without samples, and neither disturbs the others."""
    costs = FixedCosts(REFERENCE, 3)
    for number, size in enumerate(SPLITS[:, 0].tolist()):
        costs.learn(table([size, 0, size], [1e-3 * (size + 64), 0.0, absurd if number % 3 else 0.1]))
    assert costs.samples[0] == pytest.approx(64.0, rel=0.2)
    assert np.isfinite(costs.samples).all()


def test_a_rank_knows_from_the_others_what_its_own_batches_do_not_show():
    sizes = np.column_stack([SPLITS, np.full(len(SPLITS), 64)])
    found = fed(sizes, 100.0, 0.02).samples
    assert found[2] == pytest.approx(100.0, rel=0.4)


def test_a_ranks_own_evidence_wins_over_that_of_the_others():
    """Seven ranks have a large fixed cost, and one of another kind has a small one."""
    sizes = np.column_stack([SPLITS[:, [i % 2]] for i in range(8)])
    beta = np.array([10.0] + [300.0] * 7)
    found = fed(np.concatenate([sizes] * 2), beta, 0.02).samples
    assert found[0] < 40.0
    assert found[1:] == pytest.approx([300.0] * 7, rel=0.4)


def test_equal_ranks_find_about_the_same():
    """Learned alone, noise made it differ by a factor of 20."""
    for seed in range(10):
        found = fed(SPLITS, of_share(0.9), 0.1, seed).samples
        assert found.max() / found.min() < 3.0


def test_it_forgets_a_fixed_cost_that_is_another_by_now():
    costs = fed(np.concatenate([SPLITS] * 3), 200.0, 0.01)
    assert costs.samples == pytest.approx([200.0] * 2, rel=0.2)
    fed(np.concatenate([SPLITS] * 6), 20.0, 0.01, seed=1, costs=costs)
    assert costs.samples == pytest.approx([20.0] * 2, rel=0.4)


def saved(costs: FixedCosts) -> dict:
    return json.loads(json.dumps(costs.state_dict(), allow_nan=False))


def test_a_saved_one_goes_on_also_with_other_ranks():
    costs = fed(SPLITS, 100.0, 0.02)
    for workers in (1, 2, 5):
        other = FixedCosts(REFERENCE, workers)
        other.load_state_dict(saved(costs))
        assert other.samples == pytest.approx([costs.samples.mean()] * workers, rel=0.3)
        again = FixedCosts(REFERENCE, 3)
        again.load_state_dict(saved(other))
        assert again.samples == pytest.approx([other.samples[0]] * 3, rel=1e-6)


def test_with_another_reference_the_fixed_cost_is_as_many_samples():
    costs = fed(SPLITS, 100.0, 0.01)
    other = FixedCosts(2 * REFERENCE, 2)
    other.load_state_dict(saved(costs))
    assert other.samples == pytest.approx(costs.samples, rel=0.3)


def test_many_ranks_that_each_know_a_little_save_what_they_know_together():
    costs = fed(np.column_stack([SPLITS[:20, [0]]] * 40), 64.0, 0.05)
    against = np.array(saved(costs)["before"])
    assert against.min() == 0.0
    assert np.count_nonzero(against < 10.0) < len(against) / 2


def test_without_evidence_none_is_restored():
    other = fed(SPLITS, 100.0)
    other.load_state_dict(saved(FixedCosts(REFERENCE, 2)))
    assert other.samples.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("change", [{"before": [1.0]}, {"before": [-1.0] * 24}, {"reference": 0.0}])
def test_a_state_that_cannot_be_is_refused(change):
    with pytest.raises(ValueError, match=r"FixedCosts.*resume"):
        FixedCosts(REFERENCE, 2).load_state_dict({**FixedCosts(REFERENCE, 2).state_dict(), **change})


def test_a_pace_does_not_jump_where_the_fixed_cost_becomes_known():
    """Whoever forecasts paces sees a rank that goes on as before. The speed is that of the reference size."""
    pace = Pace(REFERENCE)
    pace.size = 90.0
    before = pace.of(90.0, 190.0)
    pace.set_fixed_cost(100.0)
    assert pace.of(90.0, 190.0) == pytest.approx(before)
    assert pace.of(40.0, 140.0) == pytest.approx(before)
    assert pace.speed(before) == pytest.approx(REFERENCE / (REFERENCE + 100.0))


def test_a_saved_pace_goes_on():
    pace, other = Pace(REFERENCE), Pace(REFERENCE)
    pace.size = 90.0
    pace.set_fixed_cost(70.0)
    other.load_state_dict(json.loads(json.dumps(pace.state_dict())))
    assert other.of(30.0, 1.0) == pace.of(30.0, 1.0)
    assert other.speed(5.0) == pace.speed(5.0)
    other.set_fixed_cost(20.0)
    pace.set_fixed_cost(20.0)
    assert other.speed(5.0) == pace.speed(5.0)


@pytest.mark.parametrize("change", [{"samples": -1.0}, {"size": 0.0}, {"factor": float("inf")}])
def test_the_state_of_a_pace_that_cannot_be_is_refused(change):
    with pytest.raises(ValueError, match=r"Pace.*resume"):
        Pace(REFERENCE).load_state_dict({**Pace(REFERENCE).state_dict(), **change})
