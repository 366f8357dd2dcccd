"""What simulated ranks measure, learn and report: by production's own meters, each driven by a simulated clock."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.measurement.readings import ResourceMeter
from hvd_hetero.measurement.speed_meter import SpeedMeter
from hvd_hetero.policies import Policy
from hvd_hetero.prediction import NARX, Predictor
from hvd_hetero.tools.simulation.cluster import DriverMeter, Machines

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class SpeedMeters:
    """One ``SpeedMeter`` a rank; ``make`` builds their predictors, in place of the policy's."""

    def __init__(
        self, machines: Machines, policy: Policy, typical_size: float, make: Callable[[], Predictor] | None = None
    ) -> None:
        cluster = machines.cluster
        clock, computed = np.zeros(machines.count), np.zeros(machines.count, dtype=np.int64)
        self._clock, self._computed = clock, computed

        def meter(rank: int) -> SpeedMeter:
            readings = DriverMeter(cluster.workers[rank], rank, cluster.seed, clock, computed)
            return SpeedMeter(
                _predictor(policy) if make is None else make(), lambda: float(clock[rank]),
                cast(ResourceMeter, readings), typical_size, profile=policy.profile(),
                weighs_fixed_cost=policy.weighs_fixed_cost,
            )  # fmt: skip

        self.each = [meter(rank) for rank in range(machines.count)]

    def round(
        self, start_s: Floats, done_s: Floats, input_s: Floats, samples: Ints, micro_batches: Ints, *, short: bool
    ) -> dict[str, Floats]:
        """Let each rank learn of computing from ``start_s`` to ``done_s``, as ``Balancer`` does; return all rows."""
        rows = []
        for rank, meter in enumerate(self.each):
            self._clock[rank] = start_s[rank]
            meter.begin(float(input_s[rank]))
            self._clock[rank] = done_s[rank]
            meter.done(int(samples[rank]))
            meter.round.micro_batches = int(micro_batches[rank])
            self._computed[rank] += 1
            meter.learn(short=short)
            rows.append(meter.row())
            meter.do_deferred_work()
            meter.end_round(float(self._clock[rank]))
        return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in rows[0]}

    def set_fixed_cost(self, fixed_samples: Floats) -> None:
        """Set each rank's fixed cost, in samples."""
        for meter, samples in zip(self.each, fixed_samples.tolist(), strict=True):
            if meter.learner.pace is not None:
                meter.learner.pace.set_fixed_cost(samples)


def _predictor(policy: Policy) -> Predictor:
    """Return a predictor of a rank's own, as in production, where each rank is a process."""
    predictor = policy.predictor()
    # An object given to the policy is the same each time; in production each process would have its own.
    if policy.predictor() is predictor:
        return copy.deepcopy(predictor)
    # In the background NARX's forecasts would depend on the wall clock.
    return NARX(background=False) if type(predictor) is NARX else predictor
