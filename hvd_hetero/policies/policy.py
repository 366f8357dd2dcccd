"""The base of all policies: a pure function from the agreed table to the next plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from hvd_hetero.allocation.largest_remainder import quantise
from hvd_hetero.bounds import checked_bounds
from hvd_hetero.checks import integer
from hvd_hetero.kept import Kept
from hvd_hetero.prediction.base import Predictor
from hvd_hetero.prediction.predictor_names import predictor
from hvd_hetero.rounds import FinishedRound, RoundPlan

if TYPE_CHECKING:
    from hvd_hetero.measurement.device_profile import DeviceProfile


class Policy(Kept, ABC):
    """Decides, from what all ranks know, what each rank does in the next round.

    The same tables give the same plans on every rank and on every processor. Hence a policy decides in integers:
    it quantises measurements before it compares or divides them. It uses nothing that was measured on one rank alone;
    a rank's prediction of its own speed reaches it through the table. It may keep what follows from earlier tables,
    such as an allocation that has settled, and saves that as its state. Each training works with a copy of the object
    that it is given (``LoadBalance.policy``).
    """

    name: ClassVar[str]
    """The name that users and reports call the policy by."""

    measures: ClassVar[bool] = True
    """Whether plans depend on measured times. If not, a rank may report none."""

    weighs_fixed_cost: bool = False
    """Whether plans count what a micro-batch costs besides its samples (``hvd_hetero.measurement.fixed_cost``)."""

    updates_locally: bool = False
    """Whether ranks update their own parameters after every micro-batch (``RoundPlan.local``)."""

    keeps_total: ClassVar[bool] = True
    """Whether every round but the last of an epoch has the same number of samples, known beforehand."""

    anticipates: bool = False
    """Whether a rank stops where it expects another one to end the round soon (``measurement.anticipation``)."""

    minimum: int = 1
    """The least share of a rank that has samples: short rounds keep to it, too, while there are enough samples."""

    multiple_of: int = 1
    """The divisor of every share; in the last round of an epoch one rank may have another."""

    shares_alone: ClassVar[bool] = False
    """Whether it decides shares alone. Ranks may do them in other numbers of micro-batches than planned, equal on
    all ranks, as reducers such as DistributedDataParallel need."""

    may_rest: bool = False
    """Whether a rank may do no samples in a round; it takes part in the sums all the same."""

    shrinks_early_steps: bool = False
    """Whether a rank that stops early also takes a smaller step, as in non-blocking-sgd (see ``NonBlocking``)."""

    @property
    def accumulates(self) -> bool:
        """True if a rank may do several micro-batches in a round: an adapter that builds graphs must know beforehand.

        Most policies may. The exceptions are those whose only reason for it is a limit that is not set.
        """
        return getattr(self, "max_micro_batch", 0) is not None

    @property
    def needs_epochs(self) -> bool:
        """True if the policy learns only when an epoch ends. A loop without epochs never gets there."""
        return False

    @abstractmethod
    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Return the plan before anything was measured."""

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        """Return the plan that follows ``plan``, the latest one decided, given the latest finished round."""
        # Not ``plan``: that is bounded by memory, which may have become free again.
        return self.first(plan.workers, plan.total)

    def resized(self, plan: RoundPlan, total: int) -> RoundPlan:
        """Return the plan that follows ``plan`` where rounds have another number of samples from then on."""
        return self.first(plan.workers, total)

    def renegotiate(self, plan: RoundPlan, speeds: Sequence[float]) -> RoundPlan:
        """Return the plan to begin with if some ranks know their speed from a former membership (NaN: not known).

        ``plan`` is the result of ``first``. Policies that learn the rest as they go keep it.
        """
        return plan

    def predictor(self) -> Predictor:
        """Return a new predictor for one rank's speed. Policies that do not predict report the latest measurement."""
        return predictor("memoryless")

    def profile(self) -> DeviceProfile | None:
        """Return a new profile of one rank's device, for policies that need more than its speed."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another object of this class left off; ``state_dict`` has what was learned from the tables."""
        if state and not (self.KEPT or self.PARTS):
            raise ValueError(f"policy {self.name!r} keeps no state, got {sorted(state)}; load the state of this policy")
        super().load_state_dict(state)


def checked_micro_batch(size: Any) -> Any:
    """Return the largest micro-batch allowed, or one for each rank or device, after checking it."""
    remedy = "give a whole number of samples, or None for no limit"
    return checked_bounds("max_micro_batch", size, lambda name, bound: integer(name, bound, 1, remedy=remedy))


def checked_tolerance(tolerance: float) -> float:
    """Return the share of a round that is not worth a change, after checking it."""
    remedy = "0.02 leaves two hundredths alone, and 0 follows everything"
    if isinstance(tolerance, bool) or not isinstance(tolerance, Real):
        raise TypeError(f"tolerance must be a number, a share in [0, 1), got {tolerance!r}; {remedy}")
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be a share in [0, 1), got {tolerance}; {remedy}")
    return float(tolerance)


def comparable_speeds(speeds: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return speeds as integers that are the same on every processor; 0 for no finite positive speed."""
    usable = np.where(np.isfinite(speeds) & (speeds > 0), speeds, 0.0)
    return quantise(usable) if usable.any() else np.zeros(len(speeds), dtype=np.int64)


def equal_plan(workers: int, global_batch: int) -> RoundPlan:
    """Return the global batch cut evenly: the first ``global_batch mod workers`` ranks hold one sample more."""
    share, more = divmod(global_batch, workers)
    return RoundPlan.of(np.full(workers, share) + (np.arange(workers) < more))
