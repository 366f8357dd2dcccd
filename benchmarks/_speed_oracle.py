"""The oracle of `speed_torch.py`: stock Horovod with a split set by hand from known speeds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import demo_rank
import horovod.torch as hvd
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from hvd_hetero.allocation import proportional
from hvd_hetero.testing import SlowDown

PASS, LEFT_OUT = 12, 3  # rounds of training at one split, and first ones whose times do not count
PASSES = 8
RECENT = 60  # rounds in turns that the split is set by: more scatter less, fewer follow the machine sooner
STILL = 0.02  # of its share, or one sample: less than what a rank's time scatters by


@dataclass
class Known:
    """The oracle's knowledge of the ranks in one state: the split set for it, and the rounds trained there."""

    split: list[int]
    per_sample_s: list[float] = field(default_factory=list)
    """Seconds of work per sample on this rank, for every round."""
    splits: list[list[int]] = field(default_factory=list)
    """Split of every round."""
    in_a_row: int = 0
    """Number of the rounds that were for tuning."""


class Oracle:
    r"""Stock Horovod whose split is tuned by training.

    With t_i the median seconds that rank i is at work in a round at the split x,

        x_i <- X (x_i / t_i) / sum_j (x_j / t_j)

    until no share moves by 2 % in two passes in a row: one alone may be chance, where the machine was disturbed. At
    work is everything but waiting for others: fetching the batch, forward and backward pass, and the update. Such times
    are real training's, with Horovod's thread beside it and all ranks at work at the same moment, since each
    round ends in an allreduce. If that does not come to rest in so many passes, because the machine is not steady, the
    split is the mean of the last half of them.

    In turns with other schemes ranks are not as fast as in one row of rounds (a slow rank lost up to a twentieth), so
    from one pass of rounds on the split is set again before each turn, by the last 60 rounds in turns. Where ranks
    change, the oracle is informed (``now``), and keeps a split for each of their states.
    """

    def __init__(self, data: TensorDataset, global_batch: int, slowness: SlowDown) -> None:
        self._data, self._global_batch = data, global_batch
        self._slowness = slowness
        self.now = self.nothing_known()
        self.rounds = self._train()

    def nothing_known(self) -> Known:
        """Return an equal split, for ranks in a new state."""
        return Known([int(x) for x in proportional([1.0] * hvd.size(), self._global_batch)])

    def tune(self) -> str:
        """Find the split for the present speeds, and return how that went."""
        outcome = self._tuned()
        self.now.in_a_row = len(self.now.splits)
        return outcome

    def _tuned(self) -> str:
        tried, rests = [], 0
        for done in range(1, PASSES + 1):
            seconds = self._at_work_of_a_pass()
            tried.append(self.now.split)
            divided = divide(self.now.split, seconds)
            rests = rests + 1 if still(self.now.split, divided) else 0
            if rests == 2:
                return f"at rest after {done} passes of {PASS} rounds, {said(self.now.split, seconds)}"
            if not rests:
                self.now.split = divided
        last = np.mean(tried[-PASSES // 2 :], axis=0)
        self.now.split = [int(x) for x in proportional(last, self._global_batch)]
        seconds = self._at_work_of_a_pass()
        return f"not at rest after {PASSES} passes, so the mean of the last half, {said(self.now.split, seconds)}"

    def follow(self) -> None:
        """Adjust the split before a turn, by the last turns."""
        if (rounds := len(self.now.splits) - self.now.in_a_row) >= PASS:
            self.now.split = divide(self.now.split, self.at_work(min(rounds, RECENT)))

    def at_work(self, last: int) -> list[float]:
        """Return each rank's median seconds of work at the present split, by the last rounds."""
        mine = float(np.median(self.now.per_sample_s[-last:])) * self.now.split[hvd.rank()]
        return hvd.allgather_object(mine, name="at work")

    def judged(self, last: int) -> tuple[str, float]:
        """Return a description of the last rounds, and by how much they were longer than at a perfect split.

        Split by split, at the speeds of all of them together: what is wrong to one side does not make up for what was
        wrong to the other.
        """
        splits = self.now.splits[-last:]
        seconds = np.divide(self.at_work(last), self.now.split)
        mean = np.mean(splits, axis=0)
        off = float(np.mean([excess(split, list(split * seconds)) for split in splits]))
        return f"{said(mean, list(mean * seconds))}; all of them, {off:.1%} longer", off

    def _at_work_of_a_pass(self) -> list[float]:
        for _ in range(PASS):
            next(self.rounds)
        return self.at_work(PASS - LEFT_OUT)

    def _batches(self) -> Iterator[list[int]]:
        order = np.random.default_rng(0)
        for _ in itertools.count():
            epoch = order.permutation(len(self._data))
            for start in range(0, len(self._data) - self._global_batch + 1, self._global_batch):
                begin = start + sum(self.now.split[: hvd.rank()])
                yield epoch[begin : begin + self.now.split[hvd.rank()]].tolist()

    def _train(self) -> Iterator[list[int]]:
        model, pace = demo_rank.network(), demo_rank.Pace(self._slowness)
        names = [(f"oracle.{n}", p) for n, p in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(demo_rank.sgd(model), names, op=hvd.Sum)
        batches = iter(DataLoader(self._data, batch_sampler=self._batches()))
        while True:
            began = time.perf_counter()
            x, y = next(batches)
            optimizer.zero_grad()
            pace.gradient(model, x, y, scale=partial(torch.mul, len(x) / self._global_batch))
            computed = time.perf_counter()
            # What `step` does by itself, in two, to separate waiting for the others from the update.
            optimizer.synchronize()
            agreed = time.perf_counter()
            with optimizer.skip_synchronize():
                optimizer.step()
            self.now.per_sample_s.append((computed - began + time.perf_counter() - agreed) / len(x))
            self.now.splits.append(self.now.split)
            yield self.now.split


def divide(split: list[int], at_work_s: list[float]) -> list[int]:
    """Return the split at which all ranks would take equally long if time were proportional to samples."""
    speeds = [x / t for x, t in zip(split, at_work_s, strict=True)]
    return [int(x) for x in proportional(speeds, sum(split), minimum=1)]


def still(before: list[int], after: list[int]) -> bool:
    """Return True if no share has moved noticeably."""
    return all(abs(a - b) <= max(1, STILL * b) for b, a in zip(before, after, strict=True))


def excess(split: Sequence[float], at_work_s: list[float]) -> float:
    """Return how much longer the slowest rank takes than all would at the perfect split for these speeds."""
    speed = sum(x / t for x, t in zip(split, at_work_s, strict=True))
    return max(at_work_s) * speed / sum(split) - 1


def said(split: Sequence[float], at_work_s: list[float]) -> str:
    """Return a clause for a note: the split, its times, and the speeds that they show."""
    speeds = np.divide(split, at_work_s)
    times = ", ".join(f"{1e3 * t:.0f}" for t in at_work_s)
    return (
        f"{' : '.join(f'{x:.0f}' for x in split)}, where ranks are at work for {times} ms a round, so at speeds of "
        f"{' : '.join(f'{v:.2f}' for v in speeds / speeds.max())}, and "
        f"{excess(split, at_work_s):.1%} longer than at the perfect split for these"
    )
