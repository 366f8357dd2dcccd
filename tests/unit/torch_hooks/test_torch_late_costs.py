"""Costs that are known when samples are read: rounds are divided as by known ones, and each sample is read twice.

That all pairs of options train exactly is in the array of pairs; with worker processes, in the distributed tests.
"""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402
from jobs_on_threads import Job  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

from hvd_hetero.measurement.cost_fit import CostMeter  # noqa: E402
from hvd_hetero.policies import StaticAllocation  # noqa: E402
from hvd_hetero.testing import ThreadRankError, run_on_threads  # noqa: E402
from torch_hooks.data.late_costs import SeededSamples  # noqa: E402
from torch_hooks.data.samplers import random_state_kept, seed_all  # noqa: E402

SAMPLES, BATCH = 400, 12
LENGTHS = np.random.default_rng(4).lognormal(2.0, 1.0, SAMPLES).round() + 1.0
LOCK = threading.Lock()


class Texts(Dataset):
    """Texts whose length shows when they are read; it counts what each rank reads."""

    def __init__(self):
        self.read: Counter[int] = Counter()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        self.read[i] += 1
        return torch.full((4,), float(i), dtype=torch.float64), torch.ones(1, dtype=torch.float64), i


def trained(job, *, stop_at=None):
    seen = []
    job.loader.stop_at = stop_at
    for x, y, index in job.loader:
        job.optimizer.zero_grad()
        job.loss(x, y).backward()
        job.optimizer.step()
        seen.append(index.tolist())
    return seen


def length_of(sample):
    return LENGTHS[sample[2]]


def on_two_ranks(cost_of=length_of, **options):
    def case(rank):
        texts = Texts()
        job = Job(StaticAllocation([2, 1]), data=texts, batch=BATCH, shuffle=True, cost_of=cost_of, **options)
        return trained(job), texts.read

    return run_on_threads(case, 2)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("limited", [{}, {"max_micro_batch_cost": 300.0}])
def test_rounds_are_divided_as_by_known_costs(monkeypatch, num_workers, limited):
    monkeypatch.setattr(CostMeter, "learn", lambda *_: None)  # else by how long this machine takes
    options = {"num_workers": num_workers} | limited
    known, late = on_two_ranks(LENGTHS, **options), on_two_ranks(**options)
    assert [seen for seen, _ in late] == [seen for seen, _ in known]


def test_each_sample_is_read_for_its_cost_and_to_train_on_it():
    (_, ours), (_, theirs) = on_two_ranks()
    assert ours + theirs == Counter(dict.fromkeys(range(SAMPLES), 2))


def test_costs_are_read_some_rounds_ahead_and_not_further():
    def case(rank):
        texts = Texts()
        job = Job(StaticAllocation([2, 1]), data=texts, batch=BATCH, cost_of=length_of)
        trained(job, stop_at=5)
        return texts.read

    ours, theirs = run_on_threads(case, 2)
    assert max(ours | theirs) < (5 + 8) * BATCH + BATCH


def test_rounds_that_are_skipped_need_no_costs():
    def case(rank, skipped):
        job = Job("bsp", data=Texts(), batch=BATCH, shuffle=True, cost_of=length_of)
        if skipped:
            job.loader._cutter.skip(skipped)
        return trained(job)

    whole, rest = (run_on_threads(lambda rank, n=n: case(rank, n), 2) for n in (0, 7))
    for number in range(7, len(whole[0])):
        assert sorted(whole[0][number] + whole[1][number]) == sorted(rest[0][number - 7] + rest[1][number - 7])


@pytest.mark.parametrize(
    ("cost_of", "options", "message"),
    [
        (lambda sample: 1 / abs(sample[2] - 7), {}, "cost_of failed for index 7, ZeroDivisionError"),
        (lambda sample: float("nan") if sample[2] == 3 else 1.0, {}, "cost_of.*nan for index 3"),
        (length_of, {"max_micro_batch_cost": LENGTHS.max() - 1}, "max_micro_batch_cost.*index"),
    ],
)
def test_what_is_no_cost_is_an_error_that_names_the_sample(cost_of, options, message):
    with pytest.raises(ThreadRankError, match=message):
        on_two_ranks(cost_of, **options)


def test_random_numbers_outside_are_as_if_no_sample_had_drawn_any():
    def draw():
        return random.random(), np.random.random(), float(torch.rand(()))

    class Drawn(Texts):
        def __getitem__(self, i):
            return draw()

    samples = SeededSamples(Drawn(), sum, seed=1)
    with random_state_kept():
        seed_all(7)
        undisturbed = draw(), draw()
        seed_all(7)
        before, (one, other, again), (costs,), after = (
            draw(), samples.__getitems__([(0, 3), (1, 3), (0, 3)]), samples.__getitems__([(0, [5, 3])]), draw(),
        )  # fmt: skip
    assert (before, after) == undisturbed
    assert one == again
    assert costs.costs[1] == sum(one)
    assert len({*one, *other, *before, *after}) == 12
