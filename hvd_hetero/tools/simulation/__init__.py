"""The same policies in simulated time: what a cluster would gain, for 2 to 10,000 workers."""

from hvd_hetero.tools.simulation.availability import Availability
from hvd_hetero.tools.simulation.best import BestSplit
from hvd_hetero.tools.simulation.cluster import Cluster, Drivers, Worker
from hvd_hetero.tools.simulation.compute import Compute
from hvd_hetero.tools.simulation.engine import Options, RoundSimulation, Simulated, simulate
from hvd_hetero.tools.simulation.network import Network
from hvd_hetero.tools.simulation.variation import Exponential, Jitter, RandomSlowDown, Recorded

__all__ = [
    "Availability",
    "BestSplit",
    "Cluster",
    "Compute",
    "Drivers",
    "Exponential",
    "Jitter",
    "Network",
    "Options",
    "RandomSlowDown",
    "Recorded",
    "RoundSimulation",
    "Simulated",
    "Worker",
    "simulate",
]
