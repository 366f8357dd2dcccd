"""What simulated ranks measure, learn and report: by production's own meters, or by a bank that does the same at once.

A bank is used where all ranks have the same predictor, of a kind that has one (``prediction.banks``), and no profile of
a device. It costs a thirtieth at 1,000 ranks, and the plans are the same (a test compares them).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.measurement.fixed_cost import Pace
from hvd_hetero.measurement.readings import ResourceMeter
from hvd_hetero.measurement.speed_meter import SpeedMeter
from hvd_hetero.measurement.speed_meters import Figures, SpeedMeters
from hvd_hetero.policies import Policy
from hvd_hetero.prediction import Predictor
from hvd_hetero.prediction.banks import bank_of
from hvd_hetero.tools.simulation.availability import ALWAYS, Availabilities
from hvd_hetero.tools.simulation.cluster import Machines, Meter
from hvd_hetero.tools.simulation.foreground import in_foreground

__all__ = ["Meters", "OneByOne", "Together", "meters_of"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Meters(Protocol):
    """The meters of all ranks."""

    def failed(self, rank: int, size: int) -> int:
        """Return how large the parts of a rank's micro-batch may be that does not fit into its memory."""

    def round(
        self, start_s: Floats, done_s: Floats, input_s: Floats, samples: Ints, micro_batches: Ints, *, short: bool
    ) -> Figures:
        """Every rank has computed from ``start_s`` to ``done_s`` by its own clock: it learns, and reports these."""

    def know(self, fixed_samples: Floats) -> None:
        """Take the ranks' new fixed costs."""


class OneByOne:
    """One ``SpeedMeter`` a rank, driven through its round by its own clock."""

    def __init__(
        self, machines: Machines, policy: Policy, typical_size: float, make: Callable[[], Predictor] | None
    ) -> None:
        self._clock, self._computed = np.zeros(machines.count), np.zeros(machines.count, dtype=np.int64)
        self.each = [self._meter(rank, machines, policy, typical_size, make) for rank in range(machines.count)]

    def _meter(
        self,
        rank: int,
        machines: Machines,
        policy: Policy,
        typical_size: float,
        make: Callable[[], Predictor] | None,
    ) -> SpeedMeter:
        clock, cluster = self._clock, machines.cluster
        readings = Meter(cluster.workers[rank], rank, cluster.seed, clock, self._computed)
        meter = SpeedMeter(
            policy.predictor(), lambda: float(clock[rank]), cast(ResourceMeter, readings), typical_size,
            profile=policy.profile(), weighs_fixed_cost=policy.weighs_fixed_cost,
        )  # fmt: skip
        meter.predictor = _predictor(policy) if make is None else make()
        return meter

    def failed(self, rank: int, size: int) -> int:
        """Return the meter's answer."""
        return self.each[rank].failed(size)

    def round(
        self, start_s: Floats, done_s: Floats, input_s: Floats, samples: Ints, micro_batches: Ints, *, short: bool
    ) -> Figures:
        """Take the steps of ``Balancer.report``, for each rank in turn."""
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
            meter.rest()
            meter.end_round(float(self._clock[rank]))
        return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in rows[0]}

    def know(self, fixed_samples: Floats) -> None:
        """Give each meter its own."""
        for meter, samples in zip(self.each, fixed_samples.tolist(), strict=True):
            if meter.pace is not None:
                meter.pace.know(samples)


class Together:
    """``SpeedMeters`` of all ranks."""

    def __init__(
        self, machines: Machines, meters: Callable[[Callable[..., tuple[Floats, Floats]]], SpeedMeters]
    ) -> None:
        workers = machines.cluster.workers
        self._now, self._computed = np.zeros(machines.count), np.zeros(machines.count, dtype=np.int64)
        self._cpu = machines.availability
        self._memory = Availabilities([w.drivers.memory or ALWAYS for w in workers])
        self._cpu_known = np.array([w.drivers.known for w in workers])
        self._memory_known = np.array([w.drivers.known and w.drivers.memory is not None for w in workers])
        self._lag_s = np.array([w.drivers.lag_s for w in workers])
        self._one_by_one = {
            rank: Meter(worker, rank, machines.cluster.seed, self._now, self._computed)
            for rank, worker in enumerate(workers)
            if worker.drivers.noise or worker.drivers.recorded
        }
        self.meters = meters(self._read)

    def failed(self, rank: int, size: int) -> int:
        """Return the bank's answer."""
        return self.meters.failed(rank, size)

    def round(
        self, start_s: Floats, done_s: Floats, input_s: Floats, samples: Ints, micro_batches: Ints, *, short: bool
    ) -> Figures:
        """All ranks at once."""
        self._now[:] = done_s
        self._computed += 1
        return self.meters.round(done_s, done_s - start_s, input_s, samples, micro_batches, short=short)

    def know(self, fixed_samples: Floats) -> None:
        """Give all to the meters."""
        if self.meters.pace is not None:
            self.meters.pace.know(fixed_samples)

    def _read(self, which: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Return the drivers as ``Meter`` reads them; those that scatter or are recorded, by itself."""
        seen_s = self._now - self._lag_s
        cpu = np.where(self._cpu_known, np.clip(self._cpu.at(seen_s), 0.0, 1.0), np.nan)
        memory = np.where(self._memory_known, np.clip(self._memory.at(seen_s), 0.0, 1.0), np.nan)
        for rank, meter in self._one_by_one.items():
            if which[rank]:
                reading = meter.read()
                cpu[rank], memory[rank] = reading.cpu, reading.memory
        return cpu, memory


def meters_of(
    machines: Machines, policy: Policy, typical_size: float, make: Callable[[], Predictor] | None, *, together: bool
) -> Meters:
    """Meters of the kind that these ranks can have; ``make``: their predictors, in place of the policy's."""
    if together and make is None and policy.profile() is None:
        bank = bank_of(_predictor(policy), machines.count)
        if bank is not None:
            pace = Pace(typical_size, np.zeros(machines.count)) if policy.weighs_fixed_cost else None
            return Together(machines, lambda read: SpeedMeters(bank, pace, read))
    return OneByOne(machines, policy, typical_size, make)


def _predictor(policy: Policy) -> Predictor:
    """Return a predictor for one rank, as in production, where each rank is a process."""
    predictor = policy.predictor()
    given = policy.predictor() is predictor  # an object, which in production each process would have
    return copy.deepcopy(predictor) if given else in_foreground(predictor)
