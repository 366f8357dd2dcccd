"""Bounds of a micro-batch that users say: one for all ranks, one for each rank, or one for each kind of device."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_hetero.checks import FloatArray, IntArray
from hvd_hetero.errors import PlanMismatchError
from hvd_hetero.measurement.memory import GROWTH
from hvd_hetero.rounds import MAX_ROUND_SAMPLES, FinishedRound, RoundPlan

Said: TypeAlias = "float | Sequence[float] | Mapping[str, float] | None"
"""A bound, a list with one for each rank, or a dict with one for each name of a device; None: there is none."""

NO_BOUND = MAX_ROUND_SAMPLES

logger = logging.getLogger(__name__)


def checked_bounds(name: str, said: Any, check: Callable[[str, Any], Any]) -> Any:
    """Return the bounds as plain data, each passed through ``check(name, bound)``."""
    if said is None:
        return None
    if isinstance(said, Mapping):
        return {str(device): check(f"{name}[{device!r}]", bound) for device, bound in said.items()}
    if isinstance(said, list | tuple | np.ndarray):
        return tuple(check(f"{name}[{rank}]", bound) for rank, bound in enumerate(said))
    return check(name, said)


def bounds_of_ranks(
    name: str, said: Any, workers: int, devices: Sequence[str] = (), *, no_bound: float = NO_BOUND, logs: bool = False
) -> Any:
    """Return one bound for all ranks, a tuple with one for each, or None. ``devices``: of each rank, by name."""
    if isinstance(said, Mapping):
        if not any(devices):
            raise ValueError(f"{name} by the names of devices is for PyTorch; give a list with one bound a rank")
        # No error: the card of that name may have been lost, and one dict may serve several clusters.
        if logs and (strangers := sorted(set(said) - set(devices))):
            logger.warning("%s names %s, which no rank has; the devices are %s", name, strangers, list(devices))
        return tuple(said.get(device, no_bound) for device in devices)
    if isinstance(said, list | tuple | np.ndarray) and len(said) != workers:
        raise ValueError(f"{name} must hold one bound for each of {workers} ranks, got {len(said)}: {list(said)}")
    return said


def require_same_bounds(name: str, said: Sequence[Any], remedy: str) -> None:
    """Raise on all ranks if they have been given other bounds."""
    for rank, each in enumerate(said):
        if each != said[0]:
            raise PlanMismatchError(
                f"{name} must be the same on all ranks, got {each!r} on rank {rank} and {said[0]!r} on rank 0; {remedy}"
            )


def bounds_array(said: Any, workers: int) -> IntArray:
    """Return bounds as one number for each rank; `NO_BOUND` for none, or 0."""
    bounds = np.broadcast_to(np.asarray(0 if said is None else said, dtype=np.int64), workers)
    return np.where(bounds > 0, bounds, NO_BOUND)


class Room:
    """What the micro-batches of a round may hold, and how many there are where all ranks do equally many.

    ``user_bounds``: the user's bound of each rank. ``devices``: the ranks', by name. ``least``: micro-batches of each
    rank, at least; 0: each does as many as it needs.
    """

    def __init__(self, user_bounds: npt.ArrayLike = NO_BOUND, devices: Sequence[str] = (), *, least: int = 0) -> None:
        self.user_bounds = np.atleast_1d(user_bounds)
        self.devices = list(devices)
        self.least = least
        self.exactly = False
        """True: no more than ``least``, whatever the samples need."""
        self.held: IntArray = self.user_bounds
        """The largest micro-batch of each rank by what users say, and by what is learned."""
        self._tried: npt.ArrayLike = 0
        self._grown: npt.ArrayLike = NO_BOUND
        """The largest micro-batch of each rank so far, and how far it may grow now."""

    def count(self, total: int) -> int:
        """Return how many micro-batches each rank does of a round of so many samples, where all do equally many."""
        return self.least if self.exactly else max(self.least, -(-total // int(self.user_bounds.sum())))

    def most(self, total: int) -> float:
        """Return the samples of the largest round in no more micro-batches on all ranks than ``total`` samples need."""
        return self.count(total) * int(self.user_bounds.sum()) if self.least else math.inf

    def most_held(self, total: int) -> float:
        """Return the same by what is learned, too; no limit where more micro-batches than these would hold more."""
        if not self.least or (not self.exactly and (self.held == self.user_bounds).all()):
            return math.inf
        return self.count(total) * int(self.held.sum())

    def learn(self, finished: FinishedRound) -> None:
        """Take up the ranks' bounds, and let micro-batches grow by a quarter at most, where memory is measured.

        They do not grow before the line is known, as the optimizer has no state in the first round.
        """
        plan, table = finished.plan, finished.table
        self.hold(table.column("limit"))
        peaks = table.column("memory_peak_mib")
        if np.count_nonzero(peaks):
            tried = self._tried = np.maximum(self._tried, -(-plan.shares // np.maximum(plan.batch_counts, 1)))
            more = np.where(table.column("memory_slope_mib") > 0.0, np.maximum((GROWTH - 1.0) * tried, 1.0), 0.0)
            self._grown = np.where(peaks > 0.0, tried + more.astype(np.int64), NO_BOUND)

    def hold(self, limits: npt.ArrayLike) -> None:
        """Keep to these bounds (0: none), and to those of users."""
        self.held = np.minimum(self.user_bounds, bounds_array(limits, len(self.user_bounds)))

    def bounded(
        self, plan: RoundPlan, fixed_samples: FloatArray | float = 0.0, multiple_of: int = 1, *, by_user: bool = False
    ) -> RoundPlan:
        """Return the plan with no micro-batch beyond its rank's bound, as far as that is possible.

        Where all ranks do equally many micro-batches, shares are capped, and other ranks take the rest. These are more
        than ``least`` only if the user's bounds need that, since the user's loop must be made for it. ``by_user``: keep
        to these alone.
        """
        user = self.user_bounds
        held, grown = (user, user) if by_user else (self.held, self._grown)
        if self.least:
            count = self.count(plan.total)
            # Where not all can be kept, the user's are kept longest: beyond the others a batch may fit, or be parted.
            for most in (np.minimum(held, grown), held, user):
                plan = plan.capped(count * most, fixed_samples, multiple_of)
            return plan
        plan = plan.within(held)
        # Cut into more micro-batches, a share would never show whether it fits in one.
        return plan.capped(np.maximum(plan.batch_counts, 1) * grown, fixed_samples, multiple_of).within(held)

    def lack(self, total: int) -> str:
        """Return what to say if a round holds more samples than ``least`` micro-batches do; else nothing."""
        each, room = int(self.user_bounds.sum()), max(self.least, 1) * int(self.user_bounds.sum())
        if room >= total:
            return ""
        ranks = ", ".join(f"rank {rank}: {bound}" for rank, bound in enumerate(self.user_bounds.tolist()))
        return (
            f"global_batch={total} does not fit: in {self.least} micro-batch(es) of each rank, max_micro_batch "
            f"({ranks}) allows global_batch={room} at most; lower it, raise max_micro_batch, or give the loader "
            f"micro_batches={-(-total // each)} (gradient_accumulation_steps of a Trainer)"
        )
