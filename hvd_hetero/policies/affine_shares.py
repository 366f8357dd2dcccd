r"""Shares of ranks whose time is a line in their samples: Eq. 3 of lb-bsp for CPUs, with a fixed cost.

Rank i needs ``t_i(x) = (x + h_i) / u_i`` seconds for x samples, with ``h_i = k_i β_i`` in its k_i micro-batches.
Minimise ``max_i t_i(x_i)`` subject to ``sum x_i = X`` and ``x_i >= x_min``. Over the reals the ranks above their
minimum, F, end together:

    T = (X - (n - |F|) x_min + sum_F h_i) / sum_F u_i,      x_i = u_i T - h_i,

where F is what remains once no x_i falls below its minimum (at most n passes). A rank at its minimum may be later than
T, and no split is sooner than the latest of them: a plan is compared with this time. The plan itself is the integer
optimum (``allocation.water_filling``).

Every operation is correctly rounded and every sum exact, so all ranks find the same, whatever their processor.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hvd_hetero.allocation.largest_remainder import proportional, quantise
from hvd_hetero.allocation.problem import Problem
from hvd_hetero.allocation.water_filling import split
from hvd_hetero.policies.policy import comparable_speeds
from hvd_hetero.rounds import RoundPlan

Floats = npt.NDArray[np.float64]


class AffineCosts:
    """The ranks' own figures: ``speeds`` in micro-batches of the typical size, and ``fixed``, their β."""

    def __init__(self, speeds: Floats, fixed: Floats, typical_size: float, minimum: int, multiple_of: int) -> None:
        self._speeds, self._fixed, self._typical_size = speeds, fixed, typical_size
        self._minimum, self._step = minimum, multiple_of
        self.all_known = bool(((speeds > 0.0) & (speeds < math.inf)).all())
        self._rates = speeds * (1.0 + fixed / typical_size)  # u
        self._levels: dict[int, tuple[float, float]] = {}  # T of one micro-batch each, by the samples of a round

    def near_best(self, plan: RoundPlan, tolerance: float, trusted_part: Floats | float = 1.0) -> bool:
        """Return True if no split is sooner by more than ``tolerance``.

        ``trusted_part`` of each rank's time is beyond doubt.

        No split is sooner than T. In integers no split is sooner, either, if every rank that takes a unit from the
        latest one becomes as late.
        """
        overheads = self._overheads(plan)
        latest_s = self._latest_s(plan, overheads, trusted_part) * (1.0 - tolerance)
        with_one_more_s = float(((plan.shares + overheads + self._step) / self._rates).min())
        if with_one_more_s >= latest_s:
            return True
        return max(self._level(plan.total, overheads)) >= latest_s

    def soonest_s(self, total: int) -> float:
        """Return the time of the best real-valued split of so many samples, in one micro-batch each."""
        return max(self._level(total, self._fixed))

    def gain(self, plan: RoundPlan, trusted_part: Floats | float = 1.0) -> float:
        """Return the share of a round that the best real-valued split saves; all speeds are known."""
        overheads = self._overheads(plan)
        return max(1.0 - max(self._level(plan.total, overheads)) / self._latest_s(plan, overheads, trusted_part), 0.0)

    def round_s(self, plan: RoundPlan, *, divided: bool) -> float:
        """Return the seconds of a round of this plan's samples and micro-batches: ``divided`` as is best, or as it is.

        NaN if some speed is not known.
        """
        if not self.all_known:
            return math.nan
        overheads = self._overheads(plan)
        return max(self._level(plan.total, overheads)) if divided else self._latest_s(plan, overheads)

    def _latest_s(self, plan: RoundPlan, overheads: Floats, trusted_part: Floats | float = 1.0) -> float:
        return float(((plan.shares + overheads) / self._rates * trusted_part).max())

    def _overheads(self, plan: RoundPlan) -> Floats:
        """Return h for the micro-batches of a plan; a rank without samples counts one."""
        counts = plan.batch_counts
        return self._fixed if counts.max() <= 1 else self._fixed * np.maximum(counts, 1)

    def _level(self, total: int, overheads: Floats) -> tuple[float, float]:
        """Return T, and the seconds of the latest rank that is at its minimum and later than T; 0 if there is none."""
        if overheads is not self._fixed:
            return self._found_level(total, overheads)
        if total not in self._levels:  # several plans are compared with it
            self._levels[total] = self._found_level(total, overheads)
        return self._levels[total]

    def _found_level(self, total: int, overheads: Floats) -> tuple[float, float]:
        rates, least = self._rates, self._minimum
        level_s = (total + _sum(overheads)) / self._rate_of_all
        free = rates * level_s - overheads >= least
        if free.all():
            return level_s, 0.0
        while free.any():
            clamped = least * (len(free) - int(free.sum()))
            level_s = (total - clamped + _sum(overheads[free])) / _sum(rates[free])
            still = free & (rates * level_s - overheads >= least)
            if (still == free).all():
                break
            free = still
        return level_s, float(((least + overheads[~free]) / rates[~free]).max())

    def divided(self, plan: RoundPlan, limits: Floats | float = 0.0) -> RoundPlan:
        """Return the best plan: ranks whose speed is known divide what they hold together, the others keep it.

        Micro-batches are no larger than each rank's limit (0: it has none).
        """
        known, held = self._known, plan.shares
        rates = self._comparable_rates[known]
        total = int(held[known].sum())
        if len(rates) < 2 or total < self._minimum * len(rates) or total % self._step:  # of another minimum or multiple
            return plan
        found, best, upper = plan, plan, np.full(len(held), plan.total)
        # Other shares make other numbers of micro-batches. Four searches are arbitrary; with one, rounds were 5 %
        # longer where memory bounds most ranks.
        for _ in range(4):
            overheads = self._overheads(found)
            shares = held.copy()
            shares[known] = self._best(total, rates, overheads[known], upper[known])
            former, found = found, RoundPlan.of(shares).within(limits)
            if best is plan or self.latest_s(best) > self.latest_s(found):
                best = found
            if found.micro_batches == former.micro_batches:
                break
            # From here on no rank gets a micro-batch more than was counted, which would have to be paid for.
            largest = np.where(np.asarray(limits) > 0, limits, plan.total).astype(np.int64)
            upper = np.maximum(found.batch_counts, 1) * largest // self._step * self._step
            room = upper[known]
            if room.sum() < total or room.min() < self._minimum:
                break
        return best

    def _best(
        self, total: int, rates: Floats, overheads: Floats, upper: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the shares of ranks with these u and h, at least the minimum each; the bounds allow the total."""
        units, least = total // self._step, -(-self._minimum // self._step)
        lower = np.full(len(rates), least)
        upper = np.minimum(upper // self._step, units - least * (len(rates) - 1))
        return self._step * split(
            Problem(1.0 / rates, overheads / rates, np.zeros(len(rates)), units, lower, upper, self._step)
        )

    def latest_s(self, plan: RoundPlan, trusted_part: Floats | float = 1.0) -> float:
        """Return when the latest rank of known speed is done, in its own unit; ``trusted_part`` if all are known."""
        return float((self._seconds(plan) * trusted_part).max(initial=0.0))

    def between(self, begin: RoundPlan, end: RoundPlan, part: float) -> npt.NDArray[np.int64]:
        """Return shares that are this part of the way from one plan to another."""
        shares = begin.shares + part * (end.shares - begin.shares)
        return proportional(shares, begin.total, minimum=self._minimum, multiple_of=self._step)

    @cached_property
    def _rate_of_all(self) -> float:
        """The sum of all ranks' rates, u."""
        return _sum(self._rates)

    @cached_property
    def _comparable(self) -> npt.NDArray[np.int64]:
        return quantise(self._speeds) if self.all_known else comparable_speeds(self._speeds)

    @cached_property
    def _known(self) -> npt.NDArray[np.bool_] | slice:
        """Which ranks' speeds are known, as an index."""
        known = self._comparable > 0
        return slice(None) if np.count_nonzero(known) == len(known) else known

    @cached_property
    def _comparable_rates(self) -> Floats:
        """u, from speeds cut to what all processors would have measured alike, up to a common factor."""
        return self._comparable * (1.0 + self._fixed / self._typical_size)

    def _seconds(self, plan: RoundPlan) -> Floats:
        """Return the time t of each rank whose speed is known, in its own unit."""
        known = self._known
        return (plan.shares + self._overheads(plan))[known] / self._comparable_rates[known]


def _sum(figures: Floats) -> float:
    """Return the sum, rounded once, and so the same everywhere."""
    return math.fsum(figures.tolist()) if np.count_nonzero(figures) else 0.0
