"""Whether the ranks are still together: what must be the same in every row of the table, and what it means if not."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from hvd_hetero.errors import HeteroError, PlanMismatchError
from hvd_hetero.rounds import RoundTable
from hvd_hetero.witness import piece_of

__all__ = ["Agreement", "OnNaN", "WaysOut", "may_update", "on_nan", "settings_of"]

logger = logging.getLogger(__name__)

OnNaN: TypeAlias = Literal["raise", "skip", "allow"]
"""What becomes of a round in which some rank's gradient is not finite."""


@dataclass(frozen=True, slots=True)
class WaysOut:
    """What to do about ranks that went their own ways. An adapter has its own, in the words of its framework."""

    fingerprint: str = "Give all ranks the same policy, global_batch, data, seed, lead and parameters to train"
    contents: str = "Give all ranks the same samples in the same order, and seed what is drawn at random"
    settings: str = "Change them on all ranks alike, between the same two rounds"
    witness: str = "Change parameters on all ranks alike, and gradients only once they are summed over the ranks"
    unused: str = "Finish every micro-batch before the next one; to accumulate, set max_micro_batch of the policy"
    waiting: str = "Let all ranks call the same collectives in the same order"
    memory: str = "use a smaller model"


# To what relative tolerance. All but the first have one because unlike processors round unlike; what they are to find,
# other samples and settings, is far larger.
_MUST_AGREE = (
    ("fingerprint", 0.0, "follow another plan or another order of the data than rank 0, or train other parameters"),
    ("contents", 1e-4, "cut the round from other samples than rank 0"),
    ("settings", 1e-5, "have other hyper-parameters (learning rate, momentum, …) than rank 0"),
)
_SURE = 8  # rounds with the same bits, after which like processors are known to round alike (arbitrary)
_ROUNDING = 1e-6  # of unlike processors, in one round: some last bits of a float32
_TOLERANCE = 1e-3  # whatever rounding may explain
_ACCURATE = 4  # bytes of a number: of fewer, the last bit alone is as much as the tolerance


class Agreement:
    """Whether the ranks are together, table by table. The same on every rank, since all hold the same tables.

    Ranks of one kind of processor, with the same number of threads, hold the same bits of each parameter: they sum the
    same gradient, and update alike. Once some rounds have shown so, any difference is an error. Other ranks may round
    differently. Such differences scatter: they grow with the square root of the rounds since the bits were the same.
    """

    def __init__(self) -> None:
        self._alike = False
        self.watch((), (), ())

    def watch(self, names: Sequence[str], sizes: Sequence[int], widths: Sequence[int]) -> None:
        """Follow these parameters, in the order of their turns. All ranks have the same values of them now.

        ``widths`` are the bytes of a number of each.
        """
        self._names, self._lengths, self._widths = names, sizes, widths
        self._tables = self._same = 0
        self._met: dict[tuple[int, int], int] = {}  # by piece: the table that showed the same bits
        self._largest: dict[int, float] = {}

    def require(self, round: int, table: RoundTable, ways_out: WaysOut) -> None:
        """Raise on every rank alike, if any of them has gone its own way."""
        if not table.unanimous:
            for name, tolerance, meaning in _MUST_AGREE:
                if ranks := table.disagreement(name, tolerance):
                    raise PlanMismatchError(f"round {round}: ranks {ranks} {meaning}. {getattr(ways_out, name)}")
        self._require_parameters(round, table, ways_out)

    def _require_parameters(self, round: int, table: RoundTable, ways_out: WaysOut) -> None:
        shown, bits = table.column("witness"), table.column("bits")
        known = shown != 0.0
        self._tables += 1
        if not known.any():
            self._alike, self._same = bool((bits == bits[0]).all()), 0
            return
        first = int(known.argmax())
        which, piece = piece_of(round, self._lengths) if self._lengths else (0, slice(0, 0))
        # Relative to the largest that it ever was: numbers that pass through zero are no closer together there.
        largest = self._largest[which] = max(self._largest.get(which, 0.0), float(np.abs(shown).max()))
        equal = (shown == shown[first]) | np.isnan(shown)  # NaN is no sign of ranks that part
        apart = np.where(equal | ~known, 0.0, np.abs(shown - shown[first]) / largest)
        other_bits = known & (bits != bits[first])
        far = apart > _TOLERANCE
        if not self._widths or self._widths[which] >= _ACCURATE:
            far |= apart > _ROUNDING * math.sqrt(self._tables - self._met.get((which, piece.start), 0))
        if self._alike and self._same >= _SURE:
            far |= other_bits
        if far.any():
            name = f" (here {self._names[which]!r}, {_size(apart.max())})" if self._names else ""
            raise PlanMismatchError(
                f"round {round}: ranks {np.flatnonzero(far).tolist()} hold other parameters than rank {first}{name}. "
                f"{ways_out.witness}"
            )
        if other_bits.any():
            self._alike = False  # they round differently after all
        else:
            self._same += 1
            self._met[which, piece.start] = self._tables


def _size(apart: float) -> str:
    return f"by {apart:.1e} of its size" if apart else "in its last bits"


def on_nan(value: OnNaN, *, sums_gradients: bool) -> OnNaN:
    """Return the argument ``nan``, if it is one that this training can do."""
    if value not in get_args(OnNaN):
        raise ValueError(f"nan must be 'raise', 'skip' or 'allow', got {value!r}; 'raise' is the default")
    if value == "skip" and not sums_gradients:
        raise ValueError(
            "nan='skip' needs gradients that are summed over the ranks, and this training averages parameters; use "
            "nan='raise' or 'allow', or sync='allreduce' and a policy without local updates"
        )
    return value


def may_update(round: int, table: RoundTable, on_nan: OnNaN, *, warns: bool) -> bool:
    """Return False if the update of a round is to be skipped, since a gradient is not finite; raise by default."""
    broken = table.column("broken")
    if on_nan == "allow" or not broken.any():
        return True
    what = f"round {round}: the gradient of ranks {np.flatnonzero(broken).tolist()} is not finite"
    if on_nan == "raise":
        raise HeteroError(
            f"{what}, so no rank has updated its parameters. Look at the samples and the loss of these ranks, or pass "
            "LoadBalance(…, nan='skip') to leave out such updates"
        )
    if warns:
        logger.warning("%s, so all ranks skip the update (nan='skip')", what)
    return False


_SETTINGS = (("momentum", 0.7), ("weight_decay", 0.5), ("betas", 0.3))  # the weights only keep them apart
_NO_RATE = 1e-30  # a rate of 0 has no logarithm


def settings_of(groups: Iterable[Mapping[str, Any]]) -> float:
    """One number for the hyper-parameters that schedules change, so made that a change shows in it.

    Learning rates enter by their logarithms, for they are small beside the rest. Not a checksum, because ranks on
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
