r"""Schemes that need a parameter server and so exist only here: ASP, SSP and DynSSP (lb-bsp, section 2.2).

Worker i, in its iteration c (its clock), pulls ω from the server, computes the gradient g on its own batch, pushes
it, and goes on. The server applies what arrives, one push at a time:

    ASP       ω <- ω - η g                                            no one waits (non-blocking-sgd, Eq. 3)
    SSP       the same, but iteration c begins only when c - min_j c_j <= s (Ho et al. 2013)
    DynSSP    SSP, with  ω <- ω - η (g - ḡ_c) / k  for the k-th push of clock c to arrive, ḡ_c the mean of earlier ones:
              all updates of one clock together count as their mean, as in BSP, and a late one moves ω the less, 1/k

Since pulls and pushes of different workers interleave, g belongs to an ω that is k updates old when it arrives: its
staleness, counted here and used as it is.

Simulated event by event: pull, end of batch, arrival, end of service. Time of a batch: ``compute``, ``availability``,
``variation``; of messages and the server's queue: ``network``. Only pushes queue at the server; a pull's message is
taken to find its link free.

Differences from the papers. DynSSP: lb-bsp only cites it ("heterogeneity-aware dynamic learning rate", Jiang et al.,
2017); the rule above is this project's reading of it, staleness by the order of arrival within a clock. SSP:
reads of a cache that may be s clocks old are not modelled; a worker always pulls the newest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from _one_worker import EachWorker
from _problems import TrainingProblem
from numpy.typing import NDArray

from hvd_hetero.rounds import RoundPlan
from hvd_hetero.tools.simulation.cluster import Cluster, Machines
from hvd_hetero.tools.simulation.engine import Simulated
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A scheme. ``bound`` is s, the iterations that a worker may be ahead of the slowest; infinite for ASP."""

    name: Literal["asp", "ssp", "dyn-ssp"]
    bound: float = math.inf

    def __post_init__(self) -> None:
        if self.name not in ("asp", "ssp", "dyn-ssp"):
            raise ValueError(f"name must be 'asp', 'ssp' or 'dyn-ssp', got {self.name!r}")
        if not self.bound >= 0:
            raise ValueError(
                f"bound must not be negative, got {self.bound}; it is the staleness threshold, in iterations"
            )
        if (self.name == "asp") != math.isinf(self.bound):
            raise ValueError(f"bound goes with 'ssp' and 'dyn-ssp', which need it, got {self.bound} for {self.name!r}")


@dataclass(slots=True)
class ServerModel:
    """The parameters on the server, in training."""

    problem: TrainingProblem
    learning_rate: float
    seed: int = 0
    parameters: Floats = field(init=False)
    updates: int = 0
    _of_clock: dict[int, tuple[int, Floats]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters = self.problem.start(self.seed)

    @property
    def loss(self) -> float:
        """The loss over all training samples."""
        return self.problem.loss(self.parameters)

    @property
    def accuracy(self) -> float:
        """The accuracy on the test samples."""
        return self.problem.accuracy(self.parameters)

    def push(self, pulled: Floats, samples: Ints, clock: int | None, workers: int) -> None:
        """Apply a gradient at ``pulled``; with ``clock`` it counts as one of the pushes of that clock (DynSSP)."""
        gradient = self.problem.gradient(pulled, samples)
        self.updates += 1
        if clock is None:
            self.parameters = self.parameters - self.learning_rate * gradient
            return
        before, mean = self._of_clock.get(clock, (0, np.zeros_like(gradient)))
        step = (gradient - mean) / (before + 1)
        self.parameters = self.parameters - self.learning_rate * step
        self._of_clock[clock] = (before + 1, mean + step)
        if before + 1 == workers:
            del self._of_clock[clock]


class ServerSimulation:
    """A training with a server, in which every worker has the same batch."""

    def __init__(
        self,
        cluster: Cluster,
        scheme: Scheme,
        batch: int,
        *,
        data: WholeRounds | None = None,
        model: ServerModel | None = None,
        evaluate_every: int = 0,
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch must be at least 1 sample per worker, got {batch}")
        self.machines, self._each = Machines(cluster), EachWorker(cluster)
        self.scheme = scheme
        self.batch = batch
        self.data = data
        self.model = model
        n = self.machines.count
        self.result = Simulated(scheme.name, n)
        self.staleness: list[int] = []
        """The staleness of every push: updates between its pull and its arrival."""
        self._evaluate_every = evaluate_every
        self._clocks = [0] * n
        self._slowest = 0
        self._at_slowest = n
        self._gate: dict[int, float] = {}  # workers that wait, and since when
        self._events: list[tuple[float, int, str]] = [(0.0, i, "pull") for i in range(n)]
        self._work = {i: (np.empty(0), np.empty(0, dtype=np.int64), 0, 0.0) for i in range(n)}
        self._free_s = self._last_s = 0.0
        self._waited_s = 0.0
        self._batch_s = self.machines.devices.pieces(np.full(n, batch), np.ones(n, dtype=np.int64)).work_s

    def run(self, updates: int, progress: Callable[[], None] = lambda: None) -> Simulated:
        """Apply so many more pushes."""
        until = len(self.staleness) + updates
        heapq.heapify(self._events)
        while len(self.staleness) < until:
            time_s, worker, what = heapq.heappop(self._events)
            if what == "pull":
                self._pull(time_s, worker)
            elif what == "arrive":
                self._serve(time_s, worker)
            else:
                self._apply(time_s, worker)
                progress()
        return self.result

    def _pull(self, time_s: float, worker: int) -> None:
        clock, machines = self._clocks[worker], self.machines
        if clock - self._slowest > self.scheme.bound:
            self._gate[worker] = time_s
            return
        message_s = float(machines.network.message_s(np.float64(self._each.bandwidth(worker, time_s))))
        factor = machines.per_round.one(worker, clock) * machines.per_batch.one(worker, clock)
        finish_s = self._each.finish(worker, time_s + message_s, float(self._batch_s[worker]) * factor)
        parameters = np.empty(0) if self.model is None else self.model.parameters
        self._work[worker] = (parameters, self._take(), len(self.staleness), 2 * message_s)
        heapq.heappush(self._events, (finish_s + message_s, worker, "arrive"))

    def _take(self) -> Ints:
        if self.data is None:
            return np.empty(0, dtype=np.int64)
        samples = self.data.take_round(RoundPlan.of([min(self.batch, self.data.ahead())]))[1][0]
        self.data.finish([len(samples)])  # taken samples are done sooner or later
        return samples

    def _serve(self, time_s: float, worker: int) -> None:
        network = self.machines.network
        self._free_s = max(self._free_s, time_s) + network.message_bytes / network.server_bandwidth
        heapq.heappush(self._events, (self._free_s, worker, "apply"))

    def _apply(self, time_s: float, worker: int) -> None:
        pulled, samples, version, transfer_s = self._work[worker]
        self.staleness.append(len(self.staleness) - version)
        if self.model is not None:
            clock = self._clocks[worker] if self.scheme.name == "dyn-ssp" else None
            self.model.push(pulled, samples, clock, self.machines.count)
            if self._evaluate_every and self.model.updates % self._evaluate_every == 0:
                self.result.loss.append((time_s, self.model.updates, self.model.loss))
        self._tick(time_s, worker)
        self.result.samples.append(len(samples) if self.data is not None else self.batch)
        self.result.elapsed_s.append(time_s - self._last_s)
        self.result.idle_s.append(self._waited_s / self.machines.count)
        self.result.transfer_s.append(transfer_s / self.machines.count)
        self._last_s, self._waited_s = time_s, 0.0
        heapq.heappush(self._events, (time_s, worker, "pull"))

    def _tick(self, time_s: float, worker: int) -> None:
        """Advance the worker's clock; if it was the last of the slowest, workers at the gate may go."""
        if self._clocks[worker] == self._slowest:
            self._at_slowest -= 1
        self._clocks[worker] += 1
        if self._at_slowest:
            return
        self._slowest = min(self._clocks)
        self._at_slowest = self._clocks.count(self._slowest)
        for waiting, since_s in sorted(self._gate.items()):
            self._waited_s += time_s - since_s
            heapq.heappush(self._events, (time_s, waiting, "pull"))
        self._gate.clear()
