"""The base of all sources that rounds are cut from, and one rank's part of a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_hetero.bounds import Room
from hvd_hetero.data.same_data import contents_of
from hvd_hetero.data.sample_costs import SampleCosts
from hvd_hetero.policies.policy import Policy
from hvd_hetero.rounds import MicroBatch, RoundPlan, SampleFigures

Part: TypeAlias = list[Any] | npt.NDArray[np.int64]
"""Samples, or their indices."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's part of one round."""

    plan: RoundPlan
    """The plan, shortened where the data end; the same on every rank."""
    rank: int
    part: Part
    """The rank's samples: fewer than planned where data end that this rank reads alone."""
    epoch: int
    fingerprint: int
    """A checksum of what ranks must have in common to take the same round."""
    round: int = -1
    """The number of the round, counted from the rounds agreed when it was cut."""
    contents: float = 0.0
    """One number for the samples of all ranks in this round; 0: not compared."""
    sizes: tuple[int, ...] | None = None
    """The samples of each micro-batch; None: as the plan has it."""
    figures: tuple[SampleFigures, ...] = ()
    """What each micro-batch's cost depends on, where that is not the number of samples."""

    @property
    def samples(self) -> int:
        """Samples of this rank."""
        return len(self.part)

    def micro_batch(self, samples: int, *, last: bool = True) -> MicroBatch:
        """Return one micro-batch of this round with so many samples."""
        return MicroBatch(self.plan, samples, last, self.epoch, self.fingerprint, self.round, self.contents)

    def micro_batches(self, most: int = 0) -> list[MicroBatch]:
        """Return what the rank does, one after the other; without samples, one empty micro-batch.

        No micro-batch holds more than ``most`` samples, whatever the plan says (0: as it says).
        """
        if self.sizes is not None and not 0 < most < max(self.sizes):
            each = zip(self.sizes, self.figures, strict=True)
            works = [replace(self.micro_batch(size, last=False), figures=figures) for size, figures in each]
            return [*works[:-1], replace(works[-1], last=True)]
        sizes = self.sizes or self.plan.sizes(self.rank, self.samples) or (0,)
        if 0 < most < max(sizes):
            count = -(-self.samples // most)
            base, larger = divmod(self.samples, count)
            sizes = (base,) * (count - larger) + (base + 1,) * larger
        return [self.micro_batch(size, last=j == len(sizes)) for j, size in enumerate(sizes, start=1)]


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """How the last rounds of an epoch are planned, so that each rank has its least share in them.

    A remainder that is too small for that joins the round before it. This needs rounds that all ranks finish, because
    only then does every rank know how many samples remain.
    """

    minimum: int = 1
    multiple_of: int = 1
    joins: bool = False
    """False: a remainder is a round of its own, whatever its size."""
    room: Room = field(default_factory=Room)
    """What micro-batches may hold, and how many all ranks do: the planner's."""

    @classmethod
    def of(cls, policy: Policy, room: Room, *, joins: bool = True) -> EpochEnd:
        """Return what this policy asks for."""
        return cls(policy.minimum, policy.multiple_of, joins, room)

    def apart(self, plan: RoundPlan) -> int:
        """Return how many samples after a round with this plan are a separate round."""
        joins = self.joins and plan.ends == "all"
        least = max(self.minimum, self.room.least)
        return plan.workers * -(-least // self.multiple_of) * self.multiple_of if joins else 1

    def joins_with(self, plan: RoundPlan, rest: int) -> bool:
        """Return whether a remainder joins a round with this plan."""
        apart, together = self.apart(plan), plan.total + rest
        most = self.room.most(plan.total)
        return rest < apart and (together <= most or most < plan.total or together < 2 * apart)

    def fit(self, plan: RoundPlan, left: int) -> RoundPlan:
        """Return the plan for the next round where so many samples are left: the same, a shorter or a longer one."""
        if left < plan.total + self.apart(plan):
            if left > plan.total and not self.joins_with(plan, left - plan.total):
                left -= self.apart(plan)  # memory does not hold both, so the last round takes some of this one
            # Ranks cut a round at different times, and have not all learned the same by then.
            plan = self.room.bounded(plan.resize(left, self.minimum, self.multiple_of), by_user=True)
        room = self.room
        return plan.with_equal_counts(room.least, 0 if room.exactly else room.user_bounds) if room.least else plan


class SampleOrder(ABC):
    """The samples of an epoch, in one rank's view of them.

    Call ``take`` for every round, and ``finish`` for every round that is agreed, in the same order. All ranks make the
    same calls, up to how far each takes rounds ahead.
    """

    epoch: int
    size: int | None = None
    """Samples of this epoch over all ranks; None if that is not known."""
    rounds_ahead: int = 0
    """Rounds that may be taken before the oldest of them is finished."""
    end: EpochEnd = EpochEnd()
    """How the last rounds of an epoch are planned."""
    survives_resets: bool = True
    """True: other ranks can go on where these have stopped in an epoch."""
    costs: SampleCosts | None = None
    """What samples cost; None: all cost the same."""
    marks: Callable[[Part], npt.ArrayLike] | None = None
    """A function from samples to a row of numbers for each, by which ranks compare what they cut; None: they do not."""
    _open: deque[Any]
    """Rounds that were taken and are not finished, the oldest first."""

    @property
    def in_flight(self) -> int:
        """Rounds that were taken and are not finished."""
        return len(self._open)

    @property
    def remaining(self) -> int | None:
        """Samples of this epoch that no round has taken; None if that is not known."""
        return None

    @abstractmethod
    def start(self, epoch: int) -> None:
        """Begin an epoch."""

    @abstractmethod
    def holds(self, samples: int) -> bool:
        """Return whether the next round can take so many samples of this epoch, as far as all ranks know."""

    @abstractmethod
    def take(self, plan: RoundPlan, rank: int) -> Cut:
        """Take the next round, by this plan."""

    @abstractmethod
    def finish(self, done: Sequence[float], ended: Sequence[float] = ()) -> None:
        """Put back what the oldest round in flight left undone.

        The table shows what each rank has done of its samples, and which ranks' data have ended.
        """

    def _cut(self, plan: RoundPlan, rank: int, samples: Part, fingerprint: int, *, again: bool = False) -> Cut:
        """Return a rank's part of a round's samples, alike on all ranks; ``again``: the round was cut before."""
        contents = 0.0 if self.marks is None else contents_of(self.marks(samples))
        if self.costs is None:
            begin = plan.start(rank)
            mine = samples[begin : begin + plan.samples[rank]]
            return Cut(plan, rank, mine, self.epoch, fingerprint, contents=contents)
        shared = self.costs.share_out(plan, rank, samples, self.end.room.least, again=again)
        mine = [samples[place] for place in shared.places] if isinstance(samples, list) else samples[shared.places]
        fingerprint ^= shared.checksum
        return Cut(
            plan, rank, mine, self.epoch, fingerprint, contents=contents, sizes=shared.sizes, figures=shared.figures
        )

    def ends_after(self, done: int) -> bool:
        """Return whether data that this rank reads alone end with the current round, after so many samples of it."""
        return False

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands, as plain data. Rounds in flight count as not done."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved epoch stood."""


def undone(plan: RoundPlan, samples: Part, done: Sequence[float]) -> list[Part]:
    """Return what each rank has left of a round's samples.

    Nothing if the round was to be done in full: then a rank left samples out on purpose.
    """
    if plan.ends == "all":
        return []
    # Each rank did the first samples of its part.
    tails = []
    end = 0
    for planned, count in zip(plan.samples, done, strict=True):
        begin, end = end + int(count), end + planned
        tails.append(samples[begin:end])
    return tails
