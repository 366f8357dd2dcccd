"""One worker's machine at a time, for simulations event by event (``hvd_hetero`` asks for all workers at once)."""

from __future__ import annotations

import numpy as np

from hvd_hetero.tools.simulation.availability import Availabilities
from hvd_hetero.tools.simulation.cluster import Cluster


class EachWorker:
    """When each worker's work ends, and the bandwidth of its link."""

    def __init__(self, cluster: Cluster) -> None:
        self._shares = [Availabilities([worker.availability]) for worker in cluster.workers]
        self._links = [Availabilities([worker.link]) for worker in cluster.workers]
        own = [worker.bandwidth for worker in cluster.workers]
        self._bandwidth = [cluster.network.bandwidth if each is None else each for each in own]

    def finish(self, worker: int, begin_s: float, work_s: float) -> float:
        """Return when ``work_s`` seconds at full pace, begun at ``begin_s``, are over."""
        return float(self._shares[worker].finish(begin_s, np.array([work_s]))[0])

    def bandwidth(self, worker: int, time_s: float) -> float:
        """Return the bytes per second of the worker's link."""
        return self._bandwidth[worker] * float(self._links[worker].at(time_s)[0])
