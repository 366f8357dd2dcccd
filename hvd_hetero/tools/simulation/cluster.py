"""The simulated machines: their description as data, and their state in simulated time.

A batch of Γ(x) seconds on worker i, its k-th, takes f_i(k) Γ(x) seconds of its full pace, which it gets over time:
``compute``, ``availability`` and ``variation`` in this package define each factor.

**Drivers.** Production reads from the system which share of the CPU and of the memory is available. Here the reading at
time t is a_i(t - lag) plus Gaussian noise, cut to [0, 1]: late, because production takes it over a window, and noisy.
Or readings are given, one for each round, as a run recorded them.
Memory is a separate process, which has no effect on the speed (lb-bsp, Fig. 4, shows one once a machine swaps; that
is left out).

**Measurement.** A rank measures its compute time with a relative, log-normal error; simulated time has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.measurement.readings import Resources
from hvd_hetero.tools.simulation.availability import ALWAYS, Availabilities, Availability
from hvd_hetero.tools.simulation.compute import Compute, Devices
from hvd_hetero.tools.simulation.network import Network
from hvd_hetero.tools.simulation.settings import LONGEST_S, Setting, check
from hvd_hetero.tools.simulation.variation import Draws, Jitter, Variation

Floats = NDArray[np.float64]

# Streams of chance, so that none of them moves another (see variation).
_ROUNDS, _BATCHES, _MEASUREMENT, _DRIVERS = range(4)


@dataclass(frozen=True, slots=True)
class Drivers:
    """What a worker can read of its own resources."""

    settings: ClassVar = {
        "known": Setting(bool, True),
        "lag_s": Setting(float, 0.0, 0, LONGEST_S, "seconds"),
        "noise": Setting(float, 0.0, 0, 1, "the standard deviation of a share"),
    }
    known: bool = True
    """True: it can read its CPU."""
    lag_s: float = 0.0
    noise: float = 0.0
    """Standard deviation of the error of a reading."""
    memory: Availability | None = None
    """The share of memory available; None: not known."""
    recorded: tuple[Resources, ...] = ()
    """Recorded readings, one before each round, over and over; they replace all of the above."""

    def __post_init__(self) -> None:
        check(self, self.settings)


@dataclass(frozen=True, slots=True)
class Worker:
    """One machine."""

    compute: Compute
    availability: Availability = ALWAYS
    """The share of its full speed that it has."""
    variation: tuple[Variation, ...] = ()
    bandwidth: float | None = None
    """Bytes per second of its link; None: the network's."""
    link: Availability = ALWAYS
    """The share of that bandwidth that it has."""
    drivers: Drivers = field(default_factory=Drivers)


@dataclass(frozen=True, slots=True)
class Cluster:
    """All machines and the network between them. ``seed`` decides every draw."""

    settings: ClassVar = {
        "seed": Setting(int, 0, 0, 2**63 - 1, "the seed of all draws"),
        "measurement_noise": Setting(float, 0.0, 0, 0.99, "a relative error; 0.01 is 1 %"),
    }
    workers: tuple[Worker, ...]
    network: Network = field(default_factory=Network)
    seed: int = 0
    measurement_noise: float = 0.0
    """Relative error of a rank's own compute time."""

    def __post_init__(self) -> None:
        if not self.workers:
            raise ValueError("workers must name at least one worker, got none")
        check(self, self.settings)

    @classmethod
    def of_speeds(cls, samples_per_s: Sequence[float], network: Network | None = None, seed: int = 0) -> Cluster:
        """Return a cluster of workers of constant speed."""
        workers = tuple(Worker(Compute.at_speed(v)) for v in samples_per_s)
        return cls(workers, network or Network(), seed)


class Machines:
    """A cluster in motion: each simulation makes its own, and all of one cluster meet the same events."""

    def __init__(self, cluster: Cluster) -> None:
        workers = cluster.workers
        self.cluster = cluster
        self.network = cluster.network
        self.count = len(workers)
        self.devices = Devices([w.compute for w in workers])
        self.availability = Availabilities([w.availability for w in workers])
        links = [cluster.network.bandwidth if w.bandwidth is None else w.bandwidth for w in workers]
        self._bandwidth = np.array(links, dtype=np.float64)
        self._link = Availabilities([w.link for w in workers])
        variations = [w.variation for w in workers]
        self.per_round = Draws(variations, cluster.seed, "round", _ROUNDS)
        self.per_batch = Draws(variations, cluster.seed, "batch", _BATCHES)
        error = (Jitter("round", cluster.measurement_noise),) if cluster.measurement_noise else ()
        self.measurement = Draws([error] * self.count, cluster.seed, "round", _MEASUREMENT)

    def bandwidth(self, time_s: float | Floats) -> Floats:
        """Return the bytes per second of every worker's link."""
        return self._bandwidth if self._link.constant else self._bandwidth * self._link.at(time_s)


class DriverMeter:
    """The drivers of one worker, read at the simulated time that its clock shows (as ``ResourceMeter`` reads them).

    ``computed`` counts the rounds that each worker has computed; it selects the recorded reading.
    """

    def __init__(
        self, worker: Worker, index: int, seed: int, now: Floats, computed: NDArray[np.int64] | None = None
    ) -> None:
        self._drivers = worker.drivers
        self._cpu = Availabilities([worker.availability])
        self._memory = Availabilities([worker.drivers.memory]) if worker.drivers.memory else None
        self._rng = np.random.Generator(np.random.PCG64([seed, _DRIVERS, index]))
        self._now, self._index = now, index
        self._computed = np.zeros(index + 1, dtype=np.int64) if computed is None else computed

    def read(self) -> Resources:
        """Return what is available, late and noisy; NaN if not known."""
        if not self._drivers.known:
            return Resources(math.nan, math.nan)
        if readings := self._drivers.recorded:
            return readings[int(self._computed[self._index]) % len(readings)]
        seen_s = float(self._now[self._index]) - self._drivers.lag_s
        return Resources(self._seen(self._cpu, seen_s), self._seen(self._memory, seen_s))

    def _seen(self, process: Availabilities | None, time_s: float) -> float:
        if process is None:
            return math.nan
        noise = self._rng.normal(scale=self._drivers.noise) if self._drivers.noise else 0.0
        return min(max(float(process.at(time_s)[0]) + noise, 0.0), 1.0)
