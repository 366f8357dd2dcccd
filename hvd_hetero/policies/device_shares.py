"""Shares for devices that saturate: find out their curves in the first rounds, then keep to the best split.

**The ladder.** To learn Γ every rank must see batches of many sizes; the round keeps its X samples. In step q of Q = 12

    x_i ∝ 1 + A cos(2π ((q + 1/4) / Q + i / n)),    A = 0.9,

whose sum over the n >= 2 ranks is the same in every step, since the cosines cancel. Each rank climbs from a tenth to
almost twice its equal share and down again, each at another moment. A rank that runs out of memory on the way up
reports it in the table, and from then on its micro-batches keep to what fits.

**The split** comes from ``policies.gamma_shares``. It is computed in every round and taken if it is worth a change.

Differences from the paper (lb-bsp, section 3.3): it profiles each type of device offline and by itself.
"""

from __future__ import annotations

import logging
import math

import numpy as np
import numpy.typing as npt

from hvd_hetero.allocation.largest_remainder import proportional
from hvd_hetero.kept import Figure, Kept
from hvd_hetero.measurement.device_profile import DeviceProfile
from hvd_hetero.policies.gamma_shares import LADDER_SWING, relaxed_seconds, shares_by_gamma, shares_seconds
from hvd_hetero.prediction.ema import EMA
from hvd_hetero.rounds import FinishedRound, RoundPlan

# As many sizes are enough for a bent line with a third of the measurements astray.
LADDER_STEPS = 12
# Two rounds a step, because the first batch of a size pays for buffers and kernels.
LADDER_ROUNDS = 2 * LADDER_STEPS

logger = logging.getLogger(__name__)

Shares = npt.NDArray[np.int64]


def ladder(workers: int, total: int, step: int, minimum: int = 1, multiple_of: int = 1) -> Shares:
    """Return the shares of one step of the ladder."""
    # The quarter makes the sizes on the way down differ from those on the way up.
    angles = [2 * math.pi * ((step + 0.25) / LADDER_STEPS + i / workers) for i in range(workers)]
    # Quantised before they are divided: two libraries' cosines may differ in the last bit.
    weights = [round(1024 * (1 + LADDER_SWING * math.cos(angle))) for angle in angles]
    return proportional(weights, total, minimum=minimum, multiple_of=multiple_of)


class DeviceShares(Kept):
    """The shares of one training on devices with a curve; the same on every rank."""

    KEPT = (Figure("_climbed", whole=True), Figure("_patience", whole=True), Figure("_on_ladder", whole=True))
    PARTS = ("_comm_s",)

    def __init__(self, *, minimum: int, multiple_of: int, tolerance: float) -> None:
        self._minimum = minimum
        self._multiple_of = multiple_of
        self._tolerance = tolerance
        self.restart()

    @staticmethod
    def profile() -> DeviceProfile:
        """Return a new curve of one device, which is fitted after a turn of the ladder but for two steps."""
        return DeviceProfile(enough=LADDER_STEPS - 2)

    def restart(self) -> None:
        """Forget what was learned, and begin the ladder again."""
        self._comm_s = EMA()
        self._climbed = 0
        # In one turn a device measures each size once. The second is for those whose times were disturbed in the first
        # (two is arbitrary).
        self._patience = 2 * LADDER_ROUNDS
        self._on_ladder = True

    @property
    def given_up(self) -> bool:
        """True if some device's times follow no curve."""
        return self._on_ladder and self._climbed > self._patience

    def next(self, plan: RoundPlan, finished: FinishedRound) -> Shares | None:
        """Return the shares after ``plan``, or None to keep them."""
        table = finished.table
        self._comm_s.update(table.transfer_s)  # the last to come waits for the transfer alone
        known = table.column("slope_s") > 0
        if self._on_ladder and not (self._climbed >= LADDER_ROUNDS and known.all()):
            return self._climb(plan, finished, known)
        comm_s = self._comm_s.predict()
        comm_s = comm_s if math.isfinite(comm_s) else 0.0
        now_s = float(shares_seconds(table, np.asarray(plan.samples)).max()) + comm_s
        worthwhile_s = now_s * (1.0 - self._tolerance)
        if not self._on_ladder and relaxed_seconds(table, plan.total) + comm_s >= worthwhile_s:
            return None
        try:
            shares = shares_by_gamma(table, plan, comm_s, self._minimum, self._multiple_of)
        except ValueError as error:  # such as a curve that makes no sense: training goes on with the present plan
            logger.warning("round %d: the split stays as it is: %s", finished.round, error)
            return None
        next_s = float(shares_seconds(table, shares).max()) + comm_s
        if self._on_ladder or next_s < worthwhile_s:
            self._on_ladder = False  # it is left by the first split, however good its last step was
            return shares
        return None

    def _climb(self, plan: RoundPlan, finished: FinishedRound, known: npt.NDArray[np.bool_]) -> Shares | None:
        if finished.plan.total == plan.total:  # a short round teaches nothing, so its step is not done
            self._climbed += 1
            # Rounds planned before the ladder began, and any that look like them, do not count against it.
            self._patience += max(finished.plan.samples) - min(finished.plan.samples) <= self._multiple_of
        if self.given_up:
            logger.warning(
                "no curve explains the times of ranks %s after %d rounds at different batch sizes (too much noise, or "
                "a global batch that keeps no device busy); shares follow the predicted speeds instead",
                np.flatnonzero(~known).tolist(), self._climbed,
            )  # fmt: skip
            return None
        step = max(self._climbed - 1, 0) // 2
        return ladder(plan.workers, plan.total, step, self._minimum, self._multiple_of)
