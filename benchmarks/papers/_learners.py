r"""The update rules of production, in numpy: what simulated ranks do with the samples of a round.

With S_i samples done by rank i of the x_i planned, S = sum S_i, G_i its mean gradient:

    allreduce    ω <- ω - η sum_i (S_i / S) G_i                     (BSP, LB-BSP, static, self-adaptive, non-blocking,
                                                                     ElasticBSP that accumulates): exact, whatever S_i
    n/N          ω <- ω - η sum_i (S_i / x_i) (S_i / X) G_i         (non-blocking-sgd, Algorithms 1 and 3 as printed)
    local        rank i does a step after every micro-batch; then ω <- sum_i (S_i / S) ω_i
    neighbours   ω_i <- sum_p W_ip ω_p - η n (S_i / S) G_i(ω_i)     (D-PSGD, MATCHA; Algorithm 2), or with the factor
                                                                     (S_i / x_i)^2 of the paper for n (S_i / S)

W is production's, ``hvd_hetero.topology.mixing``.
On a complete graph whose W is the mean, "neighbours" is "allreduce". The averages of D-PSGD are judged, as in the
paper's output line, by the mean of all ranks' parameters.

Shapes: n ranks, d parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from _problems import TrainingProblem
from numpy.typing import NDArray

from hvd_hetero.policies import Policy
from hvd_hetero.rounds import RoundPlan
from hvd_hetero.topology.mixing import Mixing

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rate = float | Callable[[int], float]


class RoundLearner(ABC):
    """A model in training."""

    def __init__(
        self, problem: TrainingProblem, learning_rate: Rate, *, seed: int = 0, shrinks_early_steps: bool = False
    ) -> None:
        self.problem = problem
        self._rate = learning_rate
        self.shrinks_early_steps = shrinks_early_steps
        self.updates = 0
        self.start = problem.start(seed)

    @property
    @abstractmethod
    def parameters(self) -> Floats:
        """The parameters that loss and accuracy are computed for."""

    @property
    def loss(self) -> float:
        """The loss over all training samples."""
        return self.problem.loss(self.parameters)

    @property
    def accuracy(self) -> float:
        """The accuracy on the test samples."""
        return self.problem.accuracy(self.parameters)

    def update(self, plan: RoundPlan, samples: list[Ints], done: Ints) -> None:
        """Update after rank i has done its first ``done[i]`` micro-batches, on ``samples[i]``."""
        self._update(plan, samples, done, self._rate(self.updates) if callable(self._rate) else self._rate)
        self.updates += 1

    @abstractmethod
    def _update(self, plan: RoundPlan, samples: list[Ints], done: Ints, rate: float) -> None:
        """Apply the rule itself."""


class AllreduceLearner(RoundLearner):
    """One model for all; one step with the gradients of all."""

    def __init__(
        self, problem: TrainingProblem, learning_rate: Rate, *, seed: int = 0, shrinks_early_steps: bool = False
    ) -> None:
        super().__init__(problem, learning_rate, seed=seed, shrinks_early_steps=shrinks_early_steps)
        self._parameters = self.start.copy()

    @property
    def parameters(self) -> Floats:
        """The model."""
        return self._parameters

    def _update(self, plan: RoundPlan, samples: list[Ints], done: Ints, rate: float) -> None:
        if not self.shrinks_early_steps:
            # The mean over all samples done is the weighted sum of the ranks' means.
            self._parameters = self._parameters - rate * self.problem.gradient(
                self._parameters, np.concatenate(samples)
            )
            return
        step = np.zeros_like(self._parameters)
        for rank, mine in enumerate(samples):
            if len(mine):
                weight = len(mine) / plan.samples[rank] * len(mine) / plan.total
                step += weight * self.problem.gradient(self._parameters, mine)
        self._parameters = self._parameters - rate * step


class LocalLearner(RoundLearner):
    """Every rank updates its own copy after each micro-batch; the round averages the copies by samples."""

    def __init__(self, problem: TrainingProblem, learning_rate: Rate, *, seed: int = 0) -> None:
        super().__init__(problem, learning_rate, seed=seed)
        self._parameters = self.start.copy()

    @property
    def parameters(self) -> Floats:
        """The average of the copies."""
        return self._parameters

    def _update(self, plan: RoundPlan, samples: list[Ints], done: Ints, rate: float) -> None:
        total = sum(map(len, samples))
        average = np.zeros_like(self._parameters)
        for rank, mine in enumerate(samples):
            own = self._parameters
            sizes = plan.sizes(rank)[: int(done[rank])]
            for batch in np.split(mine, np.cumsum(sizes)[:-1]) if sizes else []:
                own = own - rate * self.problem.gradient(own, batch)
            average += len(mine) / total * own
        self._parameters = average


class NeighboursLearner(RoundLearner):
    """Every rank holds a model of its own and mixes it with those of its neighbours."""

    def __init__(
        self,
        problem: TrainingProblem,
        learning_rate: Rate,
        mixing: Mixing,
        *,
        seed: int = 0,
        shrinks_early_steps: bool = False,
    ) -> None:
        super().__init__(problem, learning_rate, seed=seed, shrinks_early_steps=shrinks_early_steps)
        self._models = np.tile(self.start, (mixing.nodes, 1))
        self._mixing = mixing

    @property
    def parameters(self) -> Floats:
        """The mean of all ranks' models."""
        return np.asarray(self._models.mean(axis=0))

    def _update(self, plan: RoundPlan, samples: list[Ints], done: Ints, rate: float) -> None:
        total = sum(map(len, samples))
        steps = np.zeros_like(self._models)
        for rank, mine in enumerate(samples):
            if len(mine):
                factor = len(mine) * len(samples) / total
                if self.shrinks_early_steps:
                    factor = (len(mine) / plan.samples[rank]) ** 2
                steps[rank] = factor * self.problem.gradient(self._models[rank], mine)
        self._models = self._mixing.matrix(self.updates) @ self._models - rate * steps


def learner_for(
    policy: Policy, problem: TrainingProblem, learning_rate: Rate, seed: int = 0, mixing: Mixing | None = None
) -> RoundLearner:
    """Return the rule that goes with a policy, under allreduce or with this mixing (``RoundSimulation.mixing``)."""
    if mixing is not None:
        return NeighboursLearner(
            problem, learning_rate, mixing, seed=seed, shrinks_early_steps=policy.shrinks_early_steps
        )
    if getattr(policy, "updates", None) == "local":
        return LocalLearner(problem, learning_rate, seed=seed)
    return AllreduceLearner(problem, learning_rate, seed=seed, shrinks_early_steps=policy.shrinks_early_steps)
