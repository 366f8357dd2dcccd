"""Checks that the ranks are still together: what must be equal in each row of the table, and what differences mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_hetero.errors import HeteroError, PlanMismatchError
from hvd_hetero.rounds import RoundTable
from hvd_hetero.witness import WatchedParameter, piece_of


@dataclass(frozen=True, slots=True)
class WaysOut:
    """Advice about ranks that went their own ways. Each adapter has its own, in the words of its framework."""

    fingerprint: str = "Give all ranks the same policy, global_batch, data, seed, lead and parameters to train"
    contents: str = "Give all ranks the same samples in the same order, and seed what is drawn at random"
    settings: str = "Change them on all ranks alike, between the same two rounds"
    witness: str = "Change parameters on all ranks alike, and gradients only once they are summed over the ranks"
    unused: str = "Finish every micro-batch before the next one; to accumulate, set max_micro_batch of the policy"
    waiting: str = "Let all ranks call the same collectives in the same order"
    memory: str = "use a smaller model"


# Name, relative tolerance, meaning. Unlike processors round differently, hence the tolerances; the differences that
# matter, other samples and settings, are far larger.
_MUST_AGREE = (
    ("fingerprint", 0.0, "follow another plan or another order of the data than rank 0, or train other parameters"),
    ("contents", 1e-4, "cut the round from other samples than rank 0"),
    ("settings", 1e-5, "have other hyper-parameters (learning rate, momentum, …) than rank 0"),
)
_SURE = 8  # tables, after which like processors are known to round alike (arbitrary)
_ROUNDING = 1e-6  # of unlike processors, in one round: some last bits of a float32
_TOLERANCE = 1e-3  # whatever rounding may explain; numbers of less than four bytes have it from the first round


class Agreement:
    """Checks, table by table, that the ranks are together. All ranks hold the same tables, so all find the same.

    Ranks of one kind of processor, with the same number of threads, hold the same bits of each parameter: they sum the
    same gradient, and update alike. Once some rounds have shown so, any difference is an error. Other ranks may round
    differently. Such differences scatter: they grow with the square root of the rounds.
    """

    def __init__(self) -> None:
        self.ways_out = WaysOut()
        """What errors advise users of this framework to do."""
        self.kernels = 0.0
        """A checksum of what computes this rank's updates (``hvd_hetero.witness.kernels``)."""
        self.allow_nan = False
        self.watch(())

    def watch(self, watched: Sequence[WatchedParameter]) -> None:
        """Follow these parameters, in the order of their turns. All ranks have the same values of them now."""
        self._watched = watched
        self._tables = 0
        self._to_the_bit = True
        self._largest: dict[int, float] = {}

    def require(self, round: int, table: RoundTable, turn: int | None = None) -> None:
        """Raise on every rank alike, if any of them has gone its own way.

        ``turn`` says which parameter the ranks have shown; None: that of the round.
        """
        if not table.unanimous:
            for name, tolerance, meaning in _MUST_AGREE:
                if ranks := table.disagreement(name, tolerance):
                    raise PlanMismatchError(f"round {round}: ranks {ranks} {meaning}. {getattr(self.ways_out, name)}")
        shown, bits, kernels = map(table.column, ("witness", "bits", "kernels"))
        known = shown != 0.0
        self._tables += 1
        if not known.any() or not self._watched:
            return
        first = int(known.argmax())
        which, _ = piece_of(round if turn is None else turn, self._watched)
        # Relative to the largest that it ever was: numbers that pass through zero are no closer together there.
        largest = self._largest[which] = max(self._largest.get(which, 0.0), float(np.fmax.reduce(np.abs(shown))))
        nan = np.isnan(shown)  # which has many bits
        other = known & (bits != bits[first]) & ~(nan & nan[first])
        if not other.any():
            return
        apart = np.where(other, np.abs(shown - shown[first]) / largest, 0.0)
        strict = self._to_the_bit and self._tables > _SURE and (kernels == kernels[0]).all()
        rounding = _ROUNDING * math.sqrt(self._tables) if self._watched[which].width >= 4 else _TOLERANCE
        far = other if strict else ~(apart <= min(rounding, _TOLERANCE))
        if far.any():
            size = f"by {apart.max():.1e} of its size" if apart.any() else "in its last bits"
            raise PlanMismatchError(
                f"round {round}: ranks {np.flatnonzero(far).tolist()} hold other parameters than rank {first} (here "
                f"{self._watched[which].name!r}, {size}). {self.ways_out.witness}"
            )
        self._to_the_bit = False  # they round differently after all


def require_finite(round: int, broken: npt.NDArray[np.float64]) -> None:
    """Raise if a rank reports that its gradient of the round, which is not applied yet, is not finite."""
    if broken.any():
        raise HeteroError(
            f"round {round}: the gradient of ranks {np.flatnonzero(broken).tolist()} is not finite. Look at the "
            "samples and the loss of these ranks, or pass LoadBalance(…, allow_nan=True) to go on"
        )


_SETTINGS = (("momentum", 0.7), ("weight_decay", 0.5), ("betas", 0.3))  # the weights only keep them apart
_NO_RATE = 1e-30  # a rate of 0 has no logarithm


def settings_of(groups: Iterable[Mapping[str, Any]]) -> float:
    """Return one number for the hyper-parameters that schedules change; a change of any shows in it.

    Learning rates enter by their logarithms, because they are small beside the rest. Not a checksum, because ranks on
    unlike processors may compute a schedule with unlike last bits.
    """
    total = 0.0
    for group in groups:
        rate = group.get("lr")
        if rate is not None:
            total += math.log(abs(float(rate)) + _NO_RATE)
        for key, weight in _SETTINGS:
            value = group.get(key)
            if value is not None:
                total += weight * float(value[0] if isinstance(value, tuple | list) else value)
    return total
