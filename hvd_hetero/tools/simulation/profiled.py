r"""LB-BSP for GPUs as the paper has it: with a server, and a communication time of each worker's own (section 3.3).

    minimise max_i Γ_i(x_i) + t_i    subject to    sum x_i = X,  x^s_i <= x_i <= x^o_i                    (Eqs. 3, 5)

Γ_i is known from offline profiling, t_i is the moving average (EMA, weight 0.2) of the worker's own pull and push.

It exists only here: with an allreduce, as in production, communication ends for all at once, so there is no t_i that a
smaller batch could make room for. ``LBBSP(device="gpu")`` is production's scheme; it learns Γ_i while it trains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from hvd_hetero.allocation import minimax
from hvd_hetero.policies import Policy
from hvd_hetero.policies.base import equal_plan
from hvd_hetero.rounds import FinishedRound, RoundPlan
from hvd_hetero.tools.simulation.compute import Compute

__all__ = ["ProfiledLBBSP"]

_WEIGHT = 0.2  # of the latest communication time, as lb-bsp's EMA


class ProfiledLBBSP(Policy):
    """Shares by profiled curves and predicted communication times."""

    name: ClassVar[str] = "lb-bsp, profiled"

    def __init__(self, profiles: Sequence[Compute]) -> None:
        self._profiles = tuple(profiles)
        self._communication_s = np.zeros(len(self._profiles))
        self._known = False

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Return equal shares."""
        if workers != len(self._profiles):
            raise ValueError(
                f"profiles must name one curve per worker, got {len(self._profiles)} for {workers} workers"
            )
        return equal_plan(workers, global_batch)

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        """Return the exact optimum for the expected communication."""
        seen_s = finished.table.column("input_s")  # a simulation with a server reports a worker's own transfers there
        step = _WEIGHT if self._known else 1.0
        self._communication_s = self._communication_s + step * (seen_s - self._communication_s)
        self._known = True
        slope_s = [p.slope_s for p in self._profiles]
        lower = [math.ceil(p.saturation) for p in self._profiles]
        upper = [plan.total if p.memory_limit is None else p.memory_limit for p in self._profiles]
        split = minimax(
            slope_s, [p.intercept_s for p in self._profiles], self._communication_s, plan.total, lower, upper
        )
        return RoundPlan.of(split.shares)
