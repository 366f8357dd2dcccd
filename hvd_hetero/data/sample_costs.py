r"""Shares out the samples of a round by what they cost, where they cost unequally much: texts, recordings, graphs.

The policy divides a round of X samples as if all cost the same: x_1 … x_n. A sample of length L costs c(L) by the rule
that the ranks have agreed on (``CostRule``; before that, L). Rank i gets samples whose costs sum to about the share
x_i / X of the round's, wherever they stand in the slice of the order that the round takes: the samples *of a round* do
not depend on it, and the gradient neither, since each rank's counts as many as it holds.

All ranks divide all samples of the round, in integers, and so agree. If filling up batches costs something, a rank's
samples should be of similar length: of both ways in ``allocation.by_cost`` that one is taken whose latest rank is
sooner.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_hetero.allocation.by_cost import cut, divide, divide_padded, latest, needed, room
from hvd_hetero.allocation.largest_remainder import proportional
from hvd_hetero.bounds import bounds_of_ranks, checked_bounds
from hvd_hetero.checks import FloatArray, IntArray
from hvd_hetero.measurement.cost_fit import CostMeter
from hvd_hetero.policies.policy import Policy
from hvd_hetero.rounds import LENGTHS, NO_SAMPLES, CostRule, RoundPlan, SampleFigures

CostOf: TypeAlias = "Callable[[Any], float] | npt.ArrayLike"
"""A number for each sample, or a function of a sample."""


@dataclass(frozen=True, slots=True)
class SharedOut:
    """One rank's samples of a round."""

    places: IntArray
    """Where they stand in the round's slice, the longest first."""
    sizes: tuple[int, ...]
    """Samples of each micro-batch."""
    figures: tuple[SampleFigures, ...]
    """What each micro-batch's cost depends on."""
    checksum: int
    """A number that differs for other divisions."""


class SampleCosts:
    """What samples cost. ``size``: the samples of the dataset; None: a stream.

    ``largest``: the number of a micro-batch's samples times its greatest length, one number or one for each rank; None:
    any. ``minimum``: the samples of each rank that has some, while there are enough.
    With a function for samples that have indices, costs are noted as samples are read.
    """

    def __init__(
        self, cost_of: CostOf, fit: CostMeter, size: int | None, largest: Any = None, minimum: int = 1
    ) -> None:
        self._minimum = minimum
        self.rule: CostRule = LENGTHS
        """What samples cost in the next round to be cut."""
        self._fit = fit
        self._of: Callable[[Any], float] | None = None
        self._lengths = np.zeros(0)
        self.receive: Callable[[], None] | None = None
        """If costs are noted late, a function that waits until more of them are."""
        if not callable(cost_of):
            self._lengths = _whole(cost_of, size)
        elif size is None:
            self._of = cost_of
        else:
            self._lengths = np.full(size, np.nan)
        self._bounds = np.atleast_1d(np.asarray(largest or 0.0))
        self._largest = float(self._bounds.min())
        self.exactly = False
        """True: no more micro-batches than are asked for."""
        if len(self._lengths) and not callable(cost_of):
            self._require_fits(float(self._lengths.max()), f"index {self._lengths.argmax()}")

    @classmethod
    def of(
        cls,
        cost_of: CostOf,
        policy: Policy,
        fit: CostMeter,
        size: int | None,
        largest: Any,
        *,
        shared: bool,
        devices: Sequence[str] = (),
        logs: bool = False,
    ) -> SampleCosts:
        """Return the costs of samples, after checking that rounds can be divided by them.

        ``shared``: all ranks see all samples of a round. ``devices``: the ranks', by name.
        """
        largest = checked_bounds("max_micro_batch_cost", largest, _positive)
        largest = bounds_of_ranks(
            "max_micro_batch_cost", largest, len(devices), devices, no_bound=_SUMMABLE_COST, logs=logs
        )
        if not shared:
            raise ValueError(
                "cost_of does not go with stream='shard', where no rank sees the others' samples; read the whole "
                "stream on every rank (stream='whole')"
            )
        if not policy.shares_alone:
            raise ValueError(
                f"cost_of does not go with policy {policy.name!r}, whose micro-batches hold equally many samples; use "
                "'lb-bsp', 'bsp' or StaticAllocation"
            )
        if getattr(policy, "max_micro_batch", None):
            raise ValueError(
                "max_micro_batch of the policy counts samples, and cost_of says that they are unequal; give "
                "max_micro_batch_cost beside cost_of instead"
            )
        if policy.multiple_of > 1:
            raise ValueError(
                f"multiple_of must be 1 with cost_of, which divides by cost and not by number, got "
                f"{policy.multiple_of}; leave it out"
            )
        return cls(cost_of, fit, size, largest, policy.minimum)

    @property
    def limited(self) -> bool:
        """Whether micro-batches have a limit."""
        return self._largest > 0.0

    def forget(self) -> None:
        """Forget what was noted late: samples may cost something else in another epoch."""
        self._lengths[:] = np.nan

    def note(self, indices: IntArray, lengths: FloatArray) -> None:
        """Note what these samples cost, on all ranks alike."""
        self._lengths[indices] = lengths
        self._require_fits(float(lengths.max()), f"index {indices[lengths.argmax()]}")

    def share_out(
        self, plan: RoundPlan, rank: int, samples: Any, in_step: int = 0, *, again: bool = False
    ) -> SharedOut:
        """Return a rank's part of a round's samples.

        ``in_step``: all ranks do equally many micro-batches, at least so many. ``again``: of a round shared out before.
        """
        lengths = self._lengths_of(samples)
        if not again:
            self._fit.add_round(SampleFigures.of(lengths))
        costs, padded = self._in_units(lengths)
        enough = len(lengths) // int(np.count_nonzero(plan.shares))
        if in_step and self._largest:
            ranks, count = self._in_step(costs, padded, lengths, plan, in_step, enough)
        else:
            least, count = max(1, min(max(in_step, self._minimum), enough)), in_step
            ranks = self._divided(costs, padded, plan.shares, least)
        mine = _longest_first(np.flatnonzero(ranks == rank), lengths)
        checksum = zlib.crc32(ranks.astype("<i8").tobytes())
        if not len(mine):
            return SharedOut(mine, (0,), (NO_SAMPLES,), checksum)
        asks = self._needed(lengths[mine], rank)
        count = count if in_step else max(min(plan.micro_batches[rank], len(mine)), asks)
        rooms = room(lengths[mine], self._bound(rank)) if self._largest and count >= asks else None
        sizes = cut(costs[mine], padded[mine], count, rooms) if count > 1 else (len(mine),)
        parts = np.split(lengths[mine], np.cumsum(sizes)[:-1])
        return SharedOut(mine, sizes, tuple(map(SampleFigures.of, parts)), checksum)

    def _bound(self, rank: int) -> float:
        return float(self._bounds[rank % len(self._bounds)])

    def _needed(self, lengths: FloatArray, rank: int) -> int:
        """Return how many micro-batches these samples need at least on this rank."""
        return needed(room(lengths, self._bound(rank))) if self._largest else 1

    def _in_step(
        self, costs: IntArray, padded: IntArray, lengths: FloatArray, plan: RoundPlan, least: int, enough: int
    ) -> tuple[IntArray, int]:
        """Return the rank of each sample, and the micro-batches of all ranks: as few as hold the samples.

        Ranks take what others cannot hold. Where a round has too few samples for the micro-batches that it needs, one
        may hold a sample more.
        """
        bounds = np.resize(self._bounds, plan.workers)
        by_bounds = bounds * (plan.total / bounds.sum())
        count = max(least, 1 if self.exactly else math.ceil(lengths.sum() / bounds.sum()))
        while self.exactly or count < enough:
            at_least = max(1, min(max(count, self._minimum), enough))
            # From the plan's shares to those in proportion to the bounds.
            for part in (0.0, 0.25, 0.5, 0.75, 1.0):
                shares = plan.shares + part * (by_bounds - plan.shares)
                divided = proportional(shares, plan.total, minimum=np.minimum(plan.shares, 1))
                by_number = np.repeat(np.arange(plan.workers), divided)  # which surely fits, if all is by the bounds
                ranks = by_number if part == 1.0 else self._divided(costs, padded, divided, at_least)
                held = (_longest_first(np.flatnonzero(ranks == rank), lengths) for rank in range(plan.workers))
                if all(self._needed(lengths[each], rank) <= count for rank, each in enumerate(held)):
                    return ranks, count
            if self.exactly:
                raise ValueError(
                    f"a round of {len(lengths)} samples that cost up to {lengths.max():g} does not fit into {count} "
                    f"micro-batches on each rank by max_micro_batch_cost={bounds.tolist()}; "
                    f"global_batch={int(count * bounds.sum() / lengths.max())} does; or raise the micro-batches"
                )
            count += 1
        return self._divided(costs, padded, plan.shares, max(1, enough)), max(least, enough)

    def _divided(self, costs: IntArray, padded: IntArray, shares: IntArray, least: int) -> IntArray:
        """Return the rank of each sample, by the sooner of both ways."""
        by_number = np.repeat(np.arange(len(shares)), shares)
        ways = [divide(costs, shares, least=least)]
        if padded.any():
            ways.append(divide_padded(costs, padded, shares, least=least))
        # Considered: choosing by how much padding costs. It saves 0.1 ms, and made 64 simulated ranks wait 12 % instead
        # of 8: work is counted with padding, so padding must count in the division.
        ends = [latest(costs, padded, shares, ranks) for ranks in ways]
        self._fit.by_number = latest(costs, padded, shares, by_number) / min(ends)
        return ways[ends.index(min(ends))]

    def _in_units(self, lengths: FloatArray) -> tuple[IntArray, IntArray]:
        """Return the cost of each sample and what it costs each in its batch to be filled up to it, as integers."""
        costs, padded = self.rule.each(lengths)
        largest = max(costs.max(), padded.max())
        if not largest > 0.0:  # lengths of 0 alone
            return np.ones(len(lengths), dtype=np.int64), np.zeros(len(lengths), dtype=np.int64)
        # With 2^20 units in the largest cost, sums of 2^24 samples fit 64 bits, and one part in a million is no loss.
        units = np.rint(np.stack([costs, padded]) / largest * 2**20).astype(np.int64)
        return units[0], units[1]

    def _lengths_of(self, samples: Any) -> FloatArray:
        """Return the lengths of samples, given by index or, of a stream, themselves."""
        if self._of is None:
            lengths = np.asarray(self._lengths[samples])
            while self.receive is not None and np.isnan(lengths).any():
                self.receive()
                lengths = self._lengths[samples]
            return lengths
        which = "a sample of the stream"
        lengths = np.array([cost_from(self._of, sample, which) for sample in samples])
        self._require_fits(float(lengths.max(initial=0.0)), which)
        return lengths

    def _require_fits(self, length: float, which: str) -> None:
        if 0.0 < self._largest < length:
            raise ValueError(
                f"max_micro_batch_cost must be at least the cost of every sample, got {self._largest:g}, and {which} "
                f"costs {length:g}; raise it, or leave that sample out or cut it"
            )


def cost_from(cost_of: Callable[[Any], float], sample: Any, which: str) -> float:
    """Return what a user's function says that a sample costs, checked."""
    try:
        length = float(cost_of(sample))
    except Exception as error:
        raise ValueError(f"cost_of failed for {which}, {type(error).__name__}: {error}; {_REMEDY}") from error
    if not 0.0 <= length <= _SUMMABLE_COST:
        raise ValueError(f"cost_of must be {_IN_RANGE}, got {length} for {which}; {_REMEDY}")
    return length


def _positive(name: str, largest: float) -> float:
    if not 0.0 < largest < np.inf:
        raise ValueError(
            f"{name} must be a positive number, got {largest}; give the samples of a micro-batch times the greatest "
            "cost_of among them that memory allows"
        )
    return float(largest)


NO_COSTS = (
    "max_micro_batch_cost needs cost_of, which says what a sample costs; give both, or max_micro_batch of the policy"
)
# So that sums of squares are finite (arbitrary: no sample costs nearly as much).
_SUMMABLE_COST = 1e100
_IN_RANGE = f"from 0 to {_SUMMABLE_COST:g}"
_REMEDY = "give a length, or a number of tokens, pixels or edges, for each"


def _longest_first(places: IntArray, lengths: FloatArray) -> IntArray:
    return places[np.argsort(-lengths[places], kind="stable")]


def _whole(cost_of: npt.ArrayLike, size: int | None) -> FloatArray:
    """Return the costs of all samples of a dataset, checked."""
    if size is None:
        raise TypeError(f"cost_of must be a function of a sample for a stream, got {type(cost_of).__name__}")
    try:
        lengths = np.asarray(cost_of).astype(np.float64)
    except Exception as error:  # whatever the user's array raises, as one on another device does
        raise TypeError(
            f"cost_of must be an array in the memory of the host, got {type(cost_of).__name__} ({error}); {_REMEDY}"
        ) from error
    if lengths.shape != (size,):
        raise ValueError(
            f"cost_of must hold one number for each of the {size} samples, got shape {lengths.shape}; {_REMEDY}"
        )
    good = (lengths >= 0.0) & (lengths <= _SUMMABLE_COST)
    if not good.all():
        index = int(good.argmin())
        raise ValueError(f"cost_of[{index}] must be {_IN_RANGE}, got {lengths[index]}; {_REMEDY}")
    return lengths
