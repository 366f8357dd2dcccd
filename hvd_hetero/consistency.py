"""Checks that the ranks are still together: what must be equal in each row of the table, and what differences mean.

To look at all parameters would take as long as an update. So every round looks at a piece of one parameter, the next
round at a piece of the next. After the last parameter follows another piece of the first. With N parameters, a change
of one of them alone is seen after N rounds at the most.

Each rank reports two numbers of a piece x: a checksum of its bits, which any changed bit changes, and its parameter
norm, ``4 |x| + <r, x>`` with random signs r.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_hetero.errors import HeteroError, PlanMismatchError
from hvd_hetero.rounds import RoundTable, checksum


@dataclass(frozen=True, slots=True)
class Remedies:
    """What errors advise users to do if ranks disagree, in the words of an adapter's framework."""

    fingerprint: str = "Give all ranks the same policy, global_batch, data, seed, prefetch and parameters to train"
    contents: str = "Give all ranks the same samples in the same order, and seed what is drawn at random"
    settings: str = "Change them on all ranks alike, between the same two rounds"
    parameter_norm: str = "Change parameters on all ranks alike, and gradients only once they are summed over the ranks"
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
# After so many equal tables, processors of one kind are taken to round alike (arbitrary).
_TABLES_BEFORE_STRICT = 8
# Of unlike processors: some last bits of a float32 in one round, and whatever rounding may explain in many. Numbers of
# less than four bytes have the latter from the first round.
_ROUNDING_PER_ROUND, _ROUNDING_OF_MANY_ROUNDS = 1e-6, 1e-3
SIGNS = 2.0 * np.random.Generator(np.random.PCG64(20)).integers(0, 2, 2**13) - 1.0
"""r, the same on every rank."""
PIECE = len(SIGNS)
"""Numbers in a piece, which take some ten microseconds."""
_CPU = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")


class WatchedParameter(NamedTuple):
    """A parameter that has its turns."""

    name: str
    numbers: int
    width: int
    """Bytes of a number."""


def piece_of(round: int, watched: Sequence[WatchedParameter]) -> tuple[int, slice]:
    """Return which of the parameters has its turn in a round, and which of its numbers are looked at."""
    turn, which = divmod(round, len(watched))
    begin = turn % -(-watched[which].numbers // PIECE) * PIECE
    return which, slice(begin, begin + PIECE)


def norm_and_checksum(numbers: npt.NDArray[Any], memory: npt.NDArray[np.uint8]) -> tuple[float, float]:
    """Return the parameter norm of a piece, and a checksum of its bits, which lie in ``memory``."""
    exact = numbers.astype(np.float64)
    # The norm alone would not see numbers that were swapped, negated or drawn again. The scalar product alone may be
    # near zero, where a relative tolerance means nothing. A sum of zero would say that a rank has nothing to show.
    size = 1e-6 + 4.0 * math.sqrt(exact @ exact) + float(exact @ SIGNS[: len(exact)])
    return size, float(checksum(memory.data))


def kernels(*framework: object) -> float:
    """Return a checksum of the processor and the kernels that the framework names: equal ones round alike."""
    cpuinfo = Path("/proc/cpuinfo")
    first = cpuinfo.read_text(errors="replace").partition("\n\n")[0] if cpuinfo.exists() else ""
    processor = [line for line in first.splitlines() if line.startswith(_CPU)]
    return float(checksum(repr((processor, framework)).encode()))


class Agreement:
    """Checks, table by table, that ranks hold the same parameters, plans and settings.

    All ranks hold the same tables, so all raise together.
    """

    def __init__(self) -> None:
        self.remedies = Remedies()
        """What errors advise users of this framework to do."""
        self.kernels = 0.0
        """A checksum of what computes this rank's updates (``kernels``)."""
        self.allow_nan = False
        self.watch(())

    def watch(self, watched: Sequence[WatchedParameter]) -> None:
        """Check these parameters from now on, in this order; at this moment all ranks hold the same values."""
        self._watched = watched
        self._tables = 0
        self._to_the_bit = True
        self._largest: dict[int, float] = {}

    def require(self, round: int, table: RoundTable, turn: int | None = None) -> None:
        """Raise on every rank if the ranks disagree about the plan, the data, the settings or the parameters.

        ``turn`` says which parameter the ranks have shown; None: that of the round.
        """
        if not table.unanimous:
            for name, tolerance, meaning in _MUST_AGREE:
                if ranks := table.disagreement(name, tolerance):
                    raise PlanMismatchError(f"round {round}: ranks {ranks} {meaning}. {getattr(self.remedies, name)}")
        norms, bits, kernels = map(table.column, ("parameter_norm", "bits", "kernels"))
        known = norms != 0.0
        self._tables += 1
        if not known.any() or not self._watched:
            return
        first = int(known.argmax())
        which, _ = piece_of(round if turn is None else turn, self._watched)
        # Relative to the largest that it ever was: numbers that pass through zero are no closer together there.
        largest = self._largest[which] = max(self._largest.get(which, 0.0), float(np.fmax.reduce(np.abs(norms))))
        # NaN has many bit patterns, which mean the same.
        nan = np.isnan(norms)
        other = known & (bits != bits[first]) & ~(nan & nan[first])
        if not other.any():
            return
        apart = np.where(other, np.abs(norms - norms[first]) / largest, 0.0)
        # Ranks of one kind of processor, with the same number of threads, hold the same bits: they sum the same
        # gradient, and update alike. Once some rounds have shown so, any difference is an error.
        strict = self._to_the_bit and self._tables > _TABLES_BEFORE_STRICT and (kernels == kernels[0]).all()
        # Other ranks may round differently. Such differences scatter, so they grow with the root of the rounds.
        rounding = min(_ROUNDING_PER_ROUND * math.sqrt(self._tables), _ROUNDING_OF_MANY_ROUNDS)
        allowed = rounding if self._watched[which].width >= 4 else _ROUNDING_OF_MANY_ROUNDS
        far = other if strict else ~(apart <= allowed)
        if far.any():
            size = f"by {apart.max():.1e} of its size" if apart.any() else "in its last bits"
            raise PlanMismatchError(
                f"round {round}: ranks {np.flatnonzero(far).tolist()} hold other parameters than rank {first} (here "
                f"{self._watched[which].name!r}, {size}). {self.remedies.parameter_norm}"
            )
        self._to_the_bit = False  # they round differently after all


def require_finite(round: int, broken: npt.NDArray[np.float64]) -> None:
    """Raise if a rank reports that its gradient of the round, which is not applied yet, is not finite."""
    if broken.any():
        raise HeteroError(
            f"round {round}: the gradient of ranks {np.flatnonzero(broken).tolist()} is not finite. Look at the "
            "samples and the loss of these ranks, or pass LoadBalance(…, allow_nan=True) to go on"
        )


def settings_of(groups: Iterable[Mapping[str, Any]]) -> float:
    """Return one number for the hyper-parameters that schedules change; a change of any shows in it."""
    # Not a checksum, because ranks on unlike processors may compute a schedule with unlike last bits. Learning rates
    # enter by their logarithms, because they are small beside the others; a rate of 0 has none.
    total = 0.0
    for group in groups:
        rate = group.get("lr")
        if rate is not None:
            total += math.log(abs(float(rate)) + 1e-30)
        # Weighed unequally, so that exchanged values show.
        for weight, key in enumerate(("momentum", "weight_decay", "betas"), start=2):
            value = group.get(key)
            if value is not None:
                total += float(value[0] if isinstance(value, tuple | list) else value) / weight
    return total
