r"""AD-PSGD (Lian et al. 2018), a baseline that needs no server: workers that average with one neighbour at a time.

Worker i computes g, the gradient of a batch at its own ω_i, draws a neighbour j at random, and then

    ω_i, ω_j <- (ω_i + ω_j) / 2,        ω_i <- ω_i - η g

Others may have averaged with i since it read ω_i, so g is stale; its staleness is what others averaged into ω_i since.
The model that is judged is the mean of all ω_i.

Two ways for the neighbour to answer:

    at once           a thread of j averages while j computes: no worker waits (the paper's text)
    between batches   j answers once its own batch is done, or while it waits itself: the asker waits for it. If it
                      answers, the exchange serves both: j asks no other worker for this batch

Simulated event by event: end of batch, then the exchange of 2M bytes, α + 2M/β, which the asking worker pays for.
Differences from the paper: neighbours are all other workers; its bipartite split into asking and answering workers
exists to avoid deadlock, which a worker that answers while it waits avoids as well.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
from _one_worker import EachWorker
from _problems import TrainingProblem
from numpy.typing import NDArray

from hvd_hetero.rounds import RoundPlan
from hvd_hetero.tools.simulation.cluster import Cluster, Machines
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds

Floats = NDArray[np.float64]


@dataclass(slots=True)
class GossipModels:
    """One model a worker, in training."""

    problem: TrainingProblem
    learning_rate: float
    workers: int
    seed: int = 0
    models: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.models = np.tile(self.problem.start(self.seed), (self.workers, 1))

    @property
    def loss(self) -> float:
        """Loss of the mean model, over all training samples."""
        return self.problem.loss(self.models.mean(axis=0))

    def average(self, worker: int, neighbour: int) -> None:
        """Give both the mean of their models."""
        self.models[[worker, neighbour]] = 0.5 * (self.models[worker] + self.models[neighbour])

    def step(self, worker: int, gradient: Floats) -> None:
        """Let a worker do its step."""
        self.models[worker] -= self.learning_rate * gradient


class GossipSimulation:
    """A training by AD-PSGD, where every worker has the same batch."""

    def __init__(
        self,
        cluster: Cluster,
        batch: int,
        *,
        answers_at_once: bool = True,
        data: WholeRounds | None = None,
        models: GossipModels | None = None,
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch must be at least 1 sample per worker, got {batch}")
        if len(cluster.workers) < 2:
            raise ValueError("cluster must have at least 2 workers, got 1; AD-PSGD averages with a neighbour")
        if (data is None) != (models is None):
            raise ValueError("data and models go together; give both, or neither for times alone")
        self.machines, self._each = Machines(cluster), EachWorker(cluster)
        self.batch, self.answers_at_once, self.data, self.models = batch, answers_at_once, data, models
        n = self.machines.count
        self.now_s, self.batches, self.waited_s = 0.0, [0] * n, 0.0
        self.loss: list[tuple[float, int, float]] = []
        """(Time, samples, loss) of each evaluation."""
        self._neighbours = np.random.Generator(np.random.PCG64([cluster.seed, 211]))
        self._batch_s = self.machines.devices.seconds(np.full(n, batch))
        self._gradients = [np.empty(0)] * n
        self._asked: list[list[tuple[float, int]]] = [[] for _ in range(n)]  # waiting workers, each since when
        self._waits = [False] * n
        self._events: list[tuple[float, int, str]] = []
        for worker in range(n):
            self._begin(0.0, worker)

    @property
    def rate(self) -> float:
        """Samples per second so far."""
        return self.batch * sum(self.batches) / self.now_s

    def run(self, batches: int, evaluate_every: int = 0) -> GossipSimulation:
        """Train so many batches more, of all workers together."""
        until = sum(self.batches) + batches
        while sum(self.batches) < until:
            self.now_s, worker, what = heapq.heappop(self._events)
            if what == "computed":
                self._ask(worker)
                continue
            self.batches[worker] += 1
            done = sum(self.batches)
            if self.models is not None and evaluate_every and done % evaluate_every == 0:
                self.loss.append((self.now_s, done * self.batch, self.models.loss))
            self._begin(self.now_s, worker)
        return self

    def _begin(self, time_s: float, worker: int) -> None:
        machines, number = self.machines, self.batches[worker]
        if self.models is not None and self.data is not None:
            samples = self.data.take_round(RoundPlan.of([min(self.batch, self.data.ahead())]))[1][0]
            self.data.finish([len(samples)])
            self._gradients[worker] = self.models.problem.gradient(self.models.models[worker], samples)
        factor = machines.per_round.one(worker, number) * machines.per_batch.one(worker, number)
        finish_s = self._each.finish(worker, time_s, float(self._batch_s[worker]) * factor)
        heapq.heappush(self._events, (finish_s, worker, "computed"))

    def _ask(self, worker: int) -> None:
        """Take a worker's finished batch: answer the workers that wait for it, or else ask a neighbour."""
        if asking := self._asked[worker]:
            for since_s, other in asking:
                self.waited_s += self.now_s - since_s
                self._average(other, worker)
            for _, other in (*asking, (0.0, worker)):
                self._step(other)
            asking.clear()
            return
        neighbour = int(self._neighbours.integers(self.machines.count - 1))
        neighbour += neighbour >= worker
        if self.answers_at_once or self._waits[neighbour]:
            self._average(worker, neighbour)
            self._step(worker)
            return
        self._waits[worker] = True
        self._asked[neighbour].append((self.now_s, worker))

    def _average(self, worker: int, neighbour: int) -> None:
        if self.models is not None:
            self.models.average(worker, neighbour)

    def _step(self, worker: int) -> None:
        """Let a worker that has averaged step, and begin again once its exchange is through."""
        self._waits[worker] = False
        if self.models is not None:
            self.models.step(worker, self._gradients[worker])
        network = self.machines.network
        transfer_s = network.latency_s + 2 * network.message_bytes / self._each.bandwidth(worker, self.now_s)
        heapq.heappush(self._events, (self.now_s + transfer_s, worker, "exchanged"))
