"""ElasticBSP: supersteps in which every rank does as many iterations as bring all to the barrier together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from hvd_hetero.barriers import zipline
from hvd_hetero.checks import integer
from hvd_hetero.policies.policy import Policy, checked_tolerance, equal_plan
from hvd_hetero.prediction.base import Predictor
from hvd_hetero.prediction.predictor_names import predictor
from hvd_hetero.rounds import MAX_ROUND_SAMPLES, FinishedRound, RoundPlan


class ElasticBSP(Policy):
    r"""Rank i does ``tau_i`` iterations of a fixed batch before the next barrier (elastic-bsp, section III).

    The paper takes ranks to be stable for a short while: every future interval of rank i equals its typical recent one,
    ``a_i = b_i / v_i`` with v_i the predicted speed. So the ends of its next R iterations are ``r a_i``, r = 1 … R.
    ZipLine picks one end per rank so that the latest and the earliest are as near as possible; among equals, the
    earliest barrier. So ``1 <= tau_i <= R``, and no rank is more than R - 1 iterations ahead of another.

    ``updates="accumulate"``: the gradients of the superstep are gathered, and one update follows with their mean over
    all its samples. That is the step of one process with a batch of ``sum_i tau_i b_i``. The batch of a step thus
    varies, from X = global_batch to R X, and with it the number of steps of an epoch.

    ``updates="local"``: each rank updates its own parameters after every iteration. The barrier averages them by
    samples: with x_i the parameters of rank i after its tau_i steps and S_i its samples, ``x <- sum_i (S_i / S) x_i``.
    Floating-point state of the optimizer (momentum, second moments, step counts) is averaged likewise. So all ranks
    continue with the same state, and rank 0's checkpoint serves every rank. State of other types stays each rank's own.

    Differences from the paper: it does not say how an iteration updates. Its section VII allows "asynchronous gradient
    updates to a certain extent" between barriers, and section VI compares with averaging after tau local updates, with
    different tau of each worker; "local" is that. There is no server with its push and pull. Ends come from each rank's
    own predictor, in whole nanoseconds, so that all ranks choose the same. The tolerance is ours.

    Parameters
    ----------
    lookahead
        R, the iterations that are predicted of every rank. It bounds how long a superstep may be, and with it how stale
        the slowest rank's iterations are; the paper uses 15 to 240, and finds little gain in larger values.
    updates
        See above.
    predictor
        The predictor of each rank's speed.
    tolerance
        Barriers that wait at most this share of the barrier's own time longer than the best are as good, and of
        these the earliest is taken. Without it the noise of a measurement decides between a superstep of one iteration
        and one of R.
    """

    name: ClassVar[str] = "elastic-bsp"
    keeps_total: ClassVar[bool] = False

    def __init__(
        self,
        lookahead: int = 15,
        *,
        updates: Literal["accumulate", "local"] = "accumulate",
        predictor: str | Predictor = "ema",
        tolerance: float = 0.02,
    ) -> None:
        self.lookahead = integer("lookahead", lookahead, 1, remedy="give the number of iterations to predict")
        if updates not in ("accumulate", "local"):
            raise ValueError(
                f"updates must be 'accumulate' or 'local', got {updates!r}; 'accumulate' gives the step of one process"
            )
        self.updates = updates
        self.updates_locally = updates == "local"
        self.tolerance = checked_tolerance(tolerance)
        self._predictor = predictor
        self._batches: tuple[int, ...] = ()
        self.predictor()  # a wrong name is an error here and not in the first round

    def predictor(self) -> Predictor:
        """Return the chosen predictor: a new one by name, or the very object that was given."""
        return predictor(self._predictor)

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Return one iteration for each rank."""
        if self.lookahead * global_batch > MAX_ROUND_SAMPLES:
            raise ValueError(
                f"lookahead times global_batch, the samples of the longest superstep, must be at most "
                f"{MAX_ROUND_SAMPLES}; got lookahead={self.lookahead} with global_batch={global_batch}: use "
                f"lookahead={max(MAX_ROUND_SAMPLES // global_batch, 1)} or less, or lower global_batch"
            )
        self._batches = equal_plan(workers, global_batch).samples
        return self._plan(np.ones(workers, dtype=np.int64))

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        """Return the iterations up to the best barrier; ``plan`` if a rank has no usable prediction."""
        return self.renegotiate(plan, finished.table.figures("samples_per_s"))

    def renegotiate(self, plan: RoundPlan, speeds: Sequence[float]) -> RoundPlan:
        """Return the iterations up to the best barrier for these speeds."""
        if not all(0.0 < v < math.inf for v in speeds):
            return plan
        iteration_s = np.asarray(self._batches) / np.asarray(speeds)
        # Of iterations below 1e6 s, R in nanoseconds are far below 2^63.
        if not (iteration_s < 1e6).all():
            return plan
        # One correctly rounded division and one product decide the nanoseconds; from here on all is integer.
        iteration_ns = np.maximum(np.rint(iteration_s * 1e9), 1).astype(np.int64)
        return self._plan(self._iterations(iteration_ns))

    def _iterations(self, iteration_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        ends = iteration_ns[:, np.newaxis] * np.arange(1, self.lookahead + 1)
        best = zipline(ends)
        if self.tolerance == 0:
            return best.index + 1
        # The earliest barrier that is as good. Try each time at which the slowest rank may end an iteration, and let
        # the others take their last end before: barriers become good once their time is long enough for their wait.
        slowest = ends[int(iteration_ns.argmax())]
        share, whole = self.tolerance.as_integer_ratio()  # exactly what was given, so that all stays integer
        for time in slowest.tolist():
            tau: npt.NDArray[np.int64] = np.clip(time // iteration_ns, 1, self.lookahead)
            chosen = tau * iteration_ns
            wait = int(chosen.max() - chosen.min())
            if (wait - int(best.wait)) * whole <= share * time:
                return tau
        return best.index + 1

    def _plan(self, iterations: npt.NDArray[np.int64]) -> RoundPlan:
        counts = tuple(int(tau) for tau in iterations)
        samples = tuple(b * tau for b, tau in zip(self._batches, counts, strict=True))
        return RoundPlan(samples, counts, local=self.updates_locally)
