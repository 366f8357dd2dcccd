r"""Shares of ranks whose time is a line in their samples: Eq. 3 of lb-bsp for CPUs, with a fixed cost.

Rank i needs ``t_i(x) = (x + h_i) / u_i`` seconds for x samples, with ``h_i = k_i β_i`` in its k_i micro-batches.
Minimise ``max_i t_i(x_i)`` subject to ``sum x_i = X`` and ``x_i >= x_min``. Over the reals the ranks above their
minimum, F, end together:

    T = (X - (n - |F|) x_min + sum_F h_i) / sum_F u_i,      x_i = u_i T - h_i,

F being what is left once no x_i falls below its minimum (at most n passes). A rank at its minimum may be later than T,
and no split is sooner than the latest of them: that is what a plan is compared with. The plan itself is the integer
optimum (``allocation.minimax``).

Every operation is correctly rounded and every sum exact, so all ranks find the same, whatever their processor.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hvd_hetero.allocation import minimax, proportional
from hvd_hetero.policies.base import comparable_speeds
from hvd_hetero.rounds import RoundPlan

__all__ = ["AffineCosts", "Floats"]

Floats = npt.NDArray[np.float64]

_CHANGE_PER_GAIN = 8.0  # a round that is 3 % shorter is worth 24 % of a share; proportional costs take 6 % (arbitrary)
_SOUGHT = 4  # times, where other shares make other numbers of micro-batches (arbitrary)


class AffineCosts:
    """What the ranks tell of themselves: ``speeds`` in micro-batches of the typical size, and ``fixed``, their β."""

    def __init__(self, speeds: Floats, fixed: Floats, typical_size: float, minimum: int, multiple_of: int) -> None:
        self._speeds, self._fixed, self._typical_size = speeds, fixed, typical_size
        self._minimum, self._step = minimum, multiple_of
        self.all_known = bool(((speeds > 0.0) & (speeds < math.inf)).all())
        self._rates = speeds * (1.0 + fixed / typical_size)  # u

    def near_best(self, plan: RoundPlan, tolerance: float) -> bool:
        """Whether no split is sooner by more than ``tolerance``.

        None is sooner than T. In integers none is sooner, either, if whoever takes a unit from the latest rank becomes
        as late.
        """
        heads = self._heads(plan)
        work = plan.shares + heads
        latest_s = float((work / self._rates).max()) * (1.0 - tolerance)
        with_one_more_s = float(((work + self._step) / self._rates).min())
        if with_one_more_s >= latest_s:
            return True
        level_s, clamped_s = self._level(plan.total, heads)
        return max(level_s, clamped_s) >= latest_s

    def starves(self, plan: RoundPlan, share: float) -> bool:
        """Whether a rank has less than this share of what the best split would give it."""
        heads = self._heads(plan)
        level_s, _ = self._level(plan.total, heads)
        return bool((plan.shares < share * (self._rates * level_s - heads)).any())

    def _heads(self, plan: RoundPlan) -> Floats:
        """h, of the micro-batches that a plan has; one of a rank without samples."""
        cuts = np.maximum(plan.cuts, 1)
        return self._fixed if cuts.max() == 1 else self._fixed * cuts

    def _level(self, total: int, heads: Floats) -> tuple[float, float]:
        """T, and the seconds of the latest rank that has its minimum and is later; 0 where there is none."""
        rates, least = self._rates, self._minimum
        level_s = (total + (self._overhead if heads is self._fixed else _sum(heads))) / self._pace
        free = rates * level_s - heads >= least
        if free.all():
            return level_s, 0.0
        while free.any():
            clamped = least * (len(free) - int(free.sum()))
            level_s = (total - clamped + _sum(heads[free])) / _sum(rates[free])
            still = free & (rates * level_s - heads >= least)
            if (still == free).all():
                break
            free = still
        return level_s, float(((least + heads[~free]) / rates[~free]).max())

    def divided(self, plan: RoundPlan, max_micro_batch: int | None, limits: Floats | float = 0.0) -> RoundPlan:
        """The best plan: ranks whose speed is known divide what they hold together, the others keep it.

        Micro-batches are no larger than ``max_micro_batch``, nor than each rank's limit (0: it has none).
        """
        known, rates = self._known, self._comparable_rates
        if int(known.sum()) < 2:
            return plan
        held = plan.shares
        total = int(held[known].sum())
        largest = np.minimum(
            np.where(np.asarray(limits) > 0, limits, plan.total).astype(np.int64), max_micro_batch or plan.total
        )
        found, best, upper = plan, plan, np.full(len(held), plan.total)
        for _ in range(_SOUGHT):
            heads = self._heads(found)
            shares = held.copy()
            shares[known] = minimax(
                1.0 / rates[known], heads[known] / rates[known], 0.0, total, self._minimum, upper[known], self._step
            ).shares
            former, found = found, RoundPlan.of(shares, max_micro_batch).within(limits)
            if best is plan or self.is_later(best, found):
                best = found
            # From here on no rank gets a micro-batch more than was counted, which would have to be paid for.
            upper = np.maximum(found.cuts, 1) * largest // self._step * self._step
            room = upper[known]
            if found.micro_batches == former.micro_batches or room.sum() < total or room.min() < self._minimum:
                break
        return best

    def sooner(self, wanted: RoundPlan, held: RoundPlan, tolerance: float) -> bool:
        """Whether the latest rank of known speed is sooner by more than ``tolerance``."""
        wanted_s, held_s = (float(self._seconds(plan)[self._known].max(initial=0.0)) for plan in (wanted, held))
        return wanted_s < held_s * (1.0 - tolerance)

    def is_later(self, wanted: RoundPlan, held: RoundPlan) -> bool:
        """Whether it would take longer."""
        return float(self._seconds(wanted).max()) > float(self._seconds(held).max())

    def as_far_as_it_gains(self, wanted: RoundPlan, held: RoundPlan) -> npt.NDArray[np.int64]:
        """The shares of ``wanted``, or part of the way to them.

        Where fixed costs outweigh samples, times tell little of the best shares: noise of a hundredth would move all
        samples, and gain a hundredth. So shares change by so many times what the round gains, at most.
        """
        known, to, now = self._known, wanted.shares, held.shares
        gain = 1.0 - float(self._seconds(wanted)[known].max() / self._seconds(held)[known].max())
        change = float((np.abs(to - now) / np.maximum(np.maximum(to, now), 1)).max())
        if change <= _CHANGE_PER_GAIN * gain:
            return to
        shares = now.copy()
        between = (now + _CHANGE_PER_GAIN * gain / change * (to - now))[known]
        shares[known] = proportional(between, int(now[known].sum()), minimum=self._minimum, multiple_of=self._step)
        return shares

    @cached_property
    def _pace(self) -> float:
        """The sum of u."""
        return _sum(self._rates)

    @cached_property
    def _overhead(self) -> float:
        """The sum of β: of one micro-batch of each rank."""
        return _sum(self._fixed) if np.count_nonzero(self._fixed) else 0.0

    @cached_property
    def _comparable(self) -> npt.NDArray[np.int64]:
        return comparable_speeds(self._speeds)

    @cached_property
    def _known(self) -> npt.NDArray[np.bool_]:
        return self._comparable > 0

    @cached_property
    def _comparable_rates(self) -> Floats:
        """u, from speeds cut to what all processors would have measured alike, up to a common factor."""
        return self._comparable * (1.0 + self._fixed / self._typical_size)

    def _seconds(self, plan: RoundPlan) -> Floats:
        """t, in a unit of its own."""
        work: Floats = plan.shares + self._heads(plan)
        seconds = np.zeros(len(work))
        np.divide(work, self._comparable_rates, out=seconds, where=self._known)
        return seconds


def _sum(figures: Floats) -> float:
    """Rounded once, and so the same everywhere."""
    return math.fsum(figures.tolist())
