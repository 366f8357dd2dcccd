"""Plan, report and table: what is planned for a round, what was done in it, and the rows that all ranks share.

A **round** is everything between two synchronisations. Let ``n`` be the number of ranks, ``X`` the samples of a round:

    plan      x_1 … x_n  samples,  k_1 … k_n  micro-batches;   x_1 + … + x_n = X
    report    one row of K numbers: what rank i did and what it expects of itself
    table     the n × K rows of all ranks

The table needs no separate collective. Rank i writes its row into an otherwise zero vector of n·K numbers, and the
vector is summed over the ranks together with the gradients. Since x + 0 = x holds exactly in floating point, every rank
ends up with the same bits, in whatever order the sum is taken. What travels is float32 at the least, which holds
integers exactly up to 2^24; a global batch, or a superstep, that could be larger is refused at construction.

A plan holds samples per rank rather than samples per micro-batch, so that any total can be met exactly. The
micro-batches of a rank differ in size by one sample at most.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_hetero.allocation.largest_remainder import proportional
from hvd_hetero.columns import COLUMNS

# Counts travel as float32, which is exact up to here.
MAX_ROUND_SAMPLES = 2**24


def checksum(content: bytes | memoryview) -> int:
    """Return a checksum of 24 bits, which travels exactly as a float32."""
    return zlib.crc32(content) & 0xFFFFFF


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Samples and micro-batches of every rank for one round. A rank without samples has no micro-batches."""

    samples: tuple[int, ...]
    micro_batches: tuple[int, ...]
    ends: Literal["all", "first"] = "all"
    """"all": the round ends when every rank has done its micro-batches. "first": it ends when one rank has. The others
    stop after their current micro-batch, and what they leave undone returns to the queue."""
    local: bool = False
    """Whether each rank updates its own parameters after every micro-batch; then the round averages the parameters."""
    total: int = field(init=False, repr=False, compare=False)
    """Samples of the round over all ranks."""
    shares: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)
    """``samples`` as an array that cannot be written to."""
    batch_counts: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)
    """``micro_batches`` as an array that cannot be written to."""

    def __post_init__(self) -> None:
        if self.ends not in ("all", "first"):
            raise ValueError(
                f"ends must be 'all' or 'first', got {self.ends!r}; with 'all' a round waits for every rank"
            )
        if len(self.samples) != len(self.micro_batches):
            raise ValueError(
                f"micro_batches must hold one count for each of {len(self.samples)} ranks, as samples do, got "
                f"{len(self.micro_batches)} counts; give 0 for a rank without samples"
            )
        total = sum(self.samples)
        if total > MAX_ROUND_SAMPLES:
            raise ValueError(
                f"a round may hold at most {MAX_ROUND_SAMPLES} samples, this plan has {total}; lower global_batch"
            )
        x, k = (_fixed(counts) for counts in (self.samples, self.micro_batches))
        legal = (k >= 0) & (k >= np.minimum(x, 1)) & (k <= x)
        if not legal.all():
            rank = int(legal.argmin())
            raise ValueError(
                f"rank {rank}: {x[rank]} samples cannot be cut into {k[rank]} micro-batches; "
                "each micro-batch needs at least one sample, and a rank without samples has none"
            )
        # Made once, since at 10,000 ranks each takes 0.1 ms; a frozen object has no other way to set them.
        for name, value in (("total", total), ("shares", x), ("batch_counts", k)):
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls, samples: Sequence[int] | npt.NDArray[np.int64], micro_batch: int | Sequence[int] | None = None
    ) -> RoundPlan:
        """Return the plan with these samples per rank, in micro-batches of at most ``micro_batch`` (None: one each)."""
        counts = np.asarray(samples)
        largest = np.asarray(micro_batch or int(counts.max(initial=0)) or 1)
        return cls(tuple(counts.tolist()), tuple((-(-counts // largest)).tolist()))

    @property
    def workers(self) -> int:
        """The number of ranks."""
        return len(self.samples)

    @property
    def typical_size(self) -> float:
        """The mean size of the round's micro-batches, in samples."""
        return self.total / max(int(self.batch_counts.sum()), 1)

    def sizes(self, rank: int, held: int | None = None) -> tuple[int, ...]:
        """Return the samples of each micro-batch of a rank, the smaller ones first.

        ``held`` is the number of samples that the rank still has, where its data end in this round.
        """
        k, samples = self.micro_batches[rank], self.samples[rank]
        if held is not None and held < samples:
            k, samples = -(-held // -(-samples // k)), held
        if k == 0:
            return ()
        base, larger = divmod(samples, k)
        # Smaller first: when the size changes, the accumulated gradient is multiplied by (old size) / (new size). In
        # this order that factor is below one, and cannot overflow a half-precision gradient.
        return (base,) * (k - larger) + (base + 1,) * larger

    def start(self, rank: int) -> int:
        """Return where this rank's samples begin in the round's slice of the permutation."""
        return sum(self.samples[:rank])

    def resize(self, total: int, minimum: int = 1, multiple_of: int = 1) -> RoundPlan:
        """Return the plan for a last round of ``total`` samples: same proportions, no more micro-batches than before.

        While there are enough samples, every rank that had some keeps at least ``minimum``, and multiples of
        ``multiple_of`` but for one rank. With fewer, each keeps at least one, so that as few as possible sit idle.
        A shorter round has no larger micro-batches. It ends when all are done, because no later round could do what is
        left.
        """
        if total == self.total:
            return replace(self, ends="all")
        samples = self._divide(total, minimum, multiple_of)
        micro_batches = tuple(
            min(k, -(-x // -(-full // k))) if x else 0
            for x, full, k in zip(samples, self.samples, self.micro_batches, strict=True)
        )
        return RoundPlan(samples, micro_batches, "all", self.local)

    def _divide(self, total: int, minimum: int, multiple_of: int) -> tuple[int, ...]:
        busy = np.minimum(self.shares, 1)
        for step in (multiple_of, 1):
            over, least = total % step, busy * (-(-minimum // step) * step)
            if total - over >= least.sum():
                samples = proportional(self.samples, total - over, minimum=least, multiple_of=step)
                room = np.where(busy, self.shares - samples, -total)
                # To one rank, so that all others have a multiple.
                samples[room.argmax()] += over
                return tuple(samples.tolist())
        few = total < busy.sum()
        return tuple(proportional(self.samples, total, minimum=0 if few else busy).tolist())

    def with_equal_counts(self, least: int = 1, largest: npt.ArrayLike = 0) -> RoundPlan:
        """Return the same samples in equally many micro-batches on all ranks, at least ``least``, none empty.

        No micro-batch holds more than ``largest`` samples (0: any number), one number or one per rank. Shares that are
        too small for so many micro-batches are raised. Where the round has too few samples for that, shares become
        equal, and a micro-batch may hold one sample more.
        """

        def needed(samples: tuple[int, ...]) -> int:
            return max(RoundPlan.of(samples).within(largest).micro_batches)

        samples, count = self.samples, max(least, needed(self.samples))
        if min(samples) < count:
            if count * self.workers <= self.total:
                samples = self._divide(self.total, count, 1)
            else:
                samples = tuple(proportional(np.ones(self.workers), self.total, minimum=0).tolist())
            count = max(least, min(needed(samples), *samples))
        micro_batches = (count,) * self.workers
        same = samples is self.samples and micro_batches == self.micro_batches  # as it is in most rounds
        return self if same else replace(self, samples=samples, micro_batches=micro_batches)

    def without(self, ended: Sequence[bool]) -> RoundPlan:
        """Return the plan without the ranks whose data have ended; the others keep their work.

        It ends when all are done: a rank without data would otherwise be the first, and end it at once.
        """
        if not any(ended):
            return self
        samples = [0 if over else x for x, over in zip(self.samples, ended, strict=True)]
        if not any(samples):  # the ranks that still have data were to get none
            return RoundPlan.of(proportional([float(not over) for over in ended], self.total, minimum=0))
        micro_batches = [k if x else 0 for x, k in zip(samples, self.micro_batches, strict=True)]
        return RoundPlan(tuple(samples), tuple(micro_batches), "all", self.local)

    def within(self, limits: npt.ArrayLike) -> RoundPlan:
        """Return the same samples, in micro-batches that each rank's memory can hold (0: no limit)."""
        if not np.count_nonzero(limits):
            return self
        largest = np.asarray(limits, dtype=np.int64)
        cut = np.where(
            largest > 0, np.maximum(self.batch_counts, -(-self.shares // np.maximum(largest, 1))), self.batch_counts
        )
        return self if (cut == self.batch_counts).all() else replace(self, micro_batches=tuple(cut.tolist()))

    def capped(
        self, most: npt.ArrayLike, fixed_samples: npt.NDArray[np.float64] | float = 0.0, multiple_of: int = 1
    ) -> RoundPlan:
        """Return the plan in which no rank has more than ``most`` samples, and the others take the rest.

        They take it in proportion to what they have and ``fixed_samples``, their fixed cost in samples: ranks that
        would have ended together still do. If all together hold fewer, shares are in proportion to ``most``.
        """
        most = np.broadcast_to(np.asarray(most, dtype=np.int64), self.shares.shape)
        if (self.shares <= most).all():
            return self
        step = 1 if self.total % multiple_of else multiple_of
        whole = most // step * step
        if whole.sum() < self.total:
            shares = proportional(most, self.total, minimum=np.minimum(self.shares, 1))
        else:
            shares = np.minimum(self.shares, whole) // step * step
            while left := self.total - int(shares.sum()):
                room = whole - shares
                weights = np.where(room > 0, self.shares + fixed_samples, 0.0)
                # Where only ranks that rest have room, as it is for those.
                more = proportional(weights if weights.any() else room, left, minimum=0, multiple_of=step)
                shares = shares + np.minimum(more, room)
        batch_counts = np.clip(self.batch_counts, np.minimum(shares, 1), shares)
        return replace(self, samples=tuple(shares.tolist()), micro_batches=tuple(batch_counts.tolist()))

    def fingerprint(self, data: int = 0) -> int:
        """Return 24 bits that differ for other plans, and for another 32-bit checksum of the data they cut."""
        kind = 2 * (self.ends == "first") + self.local
        numbers = (*self.samples, *self.micro_batches, kind, data)
        return checksum(struct.pack(f"<{len(numbers)}q", *numbers))


def _fixed(counts: tuple[int, ...]) -> npt.NDArray[np.int64]:
    array = np.fromiter(counts, np.int64, len(counts))
    array.flags.writeable = False
    return array


class SampleFigures(NamedTuple):
    """What the cost of samples of unequal lengths depends on. Figures of several micro-batches add up."""

    number: float = 0.0
    length: float = 0.0
    """The sum of the lengths."""
    square: float = 0.0
    """The sum of their squares."""
    padded: float = 0.0
    """The number times the longest, as in a batch that is padded to it."""
    padded_square: float = 0.0
    """The number times the longest's square, as in attention over such a batch."""

    @classmethod
    def of(cls, lengths: npt.NDArray[np.float64]) -> SampleFigures:
        """Return the figures of one micro-batch of samples of these lengths."""
        if not len(lengths):
            return cls()
        number, longest = len(lengths), float(lengths.max())
        return cls(number, float(lengths.sum()), float(lengths @ lengths), number * longest, number * longest**2)


NO_SAMPLES = SampleFigures()


class CostRule(NamedTuple):
    """What a sample of length L costs: number + length L + square L², and what padding to it costs."""

    number: float
    length: float
    square: float
    padded: float
    padded_square: float

    def each(self, lengths: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return each sample's cost, and what every sample of a batch costs more if this one is its longest."""
        # Every operation is correctly rounded, and so the same on every rank.
        squares = lengths * lengths
        alone = self.number + self.length * lengths + self.square * squares
        return alone, self.padded * lengths + self.padded_square * squares

    def of(self, figures: SampleFigures) -> float:
        """Return the cost of samples with these figures."""
        return sum(coefficient * figure for coefficient, figure in zip(self, figures, strict=True))

    def scaled(self, factor: float) -> CostRule:
        """Return the rule for another unit of cost."""
        return CostRule(*(coefficient * factor for coefficient in self))

    @classmethod
    def agreed(cls, table: RoundTable) -> CostRule | None:
        """Return the mean of what the ranks have measured, the same on every rank; None if none has measured it."""
        columns = [table.figures(f"cost_{name}") for name in cls._fields]
        ranks = sum(map(any, zip(*columns, strict=True)))
        return cls(*(math.fsum(column) / ranks for column in columns)) if ranks else None


LENGTHS = CostRule(0.0, 1.0, 0.0, 0.0, 0.0)
"""Before anything is measured, samples cost by their lengths."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch that this rank is about to compute."""

    plan: RoundPlan
    """The plan of the whole round, shortened where an epoch ends."""
    samples: int
    last: bool = True
    """Whether it is the last of its round, so that the synchronisation follows."""
    epoch: int = 0
    data: int = 0
    """A checksum of the order of the data and the place in it."""
    round: int = -1
    """The number of its round, where the data side runs ahead."""
    contents: float = 0.0
    """One number for the samples that all ranks cut the round from; 0: not compared."""
    weight: float | None = None
    """The weight of its mean gradient in the round's; None: its samples."""
    figures: SampleFigures | None = None
    """What its cost depends on; None: its samples alone."""
    foreseen: bool = False
    """Whether it is the last because another rank is about to finish; then this rank sends no signal."""
    number: int = 0
    """Its place among the micro-batches that this rank is given in the round."""

    @property
    def gradient_weight(self) -> float:
        """The weight of its mean gradient in the round's."""
        return self.samples if self.weight is None else self.weight


class RoundReport:
    """One rank's row of the table: figures by the names of :data:`~hvd_hetero.columns.COLUMNS`; others are 0."""

    __slots__ = ("_row",)

    def __init__(self, **figures: float) -> None:
        if unknown := figures.keys() - COLUMNS.keys():
            raise TypeError(f"the table has no column {', '.join(sorted(unknown))}; hvd_hetero.columns lists them")
        self._row = [figures.get(name, 0.0) for name in COLUMNS]

    def vector(self, rank: int, workers: int, dtype: npt.DTypeLike = np.float64) -> npt.NDArray[Any]:
        """Return one rank's contribution to the table: n·K numbers, zero outside its own row."""
        numbers = np.zeros(RoundTable.length(workers), dtype)
        numbers[rank * len(_PLACES) : (rank + 1) * len(_PLACES)] = self._row
        return numbers


_PLACES = {name: place for place, name in enumerate(COLUMNS)}
_COMMON = [_PLACES[name] for name in ("fingerprint", "contents", "settings")]


class RoundTable:
    """The rows of all ranks for one round, identical on every rank. Columns are read by name (``columns``)."""

    __slots__ = ("_rows",)

    def __init__(self, vector: npt.ArrayLike, workers: int) -> None:
        numbers = np.array(vector, dtype=np.float64)
        if numbers.size != self.length(workers):
            raise ValueError(
                f"the table of {workers} ranks has {self.length(workers)} numbers, got {numbers.size}; all ranks must "
                "run the same version of this program"
            )
        self._rows = numbers.reshape(workers, len(_PLACES))

    @property
    def workers(self) -> int:
        """The number of ranks."""
        return len(self._rows)

    @staticmethod
    def length(workers: int) -> int:
        """Return how many numbers travel for this many ranks."""
        return workers * len(_PLACES)

    def figures(self, name: str) -> list[float]:
        """Return one figure of all ranks, by its name in :data:`~hvd_hetero.columns.COLUMNS`."""
        return self._rows[:, _PLACES[name]].tolist()  # type: ignore[no-any-return]

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """Return one figure of all ranks, as an array."""
        return self._rows[:, _PLACES[name]].copy()

    def lists(self) -> dict[str, list[float]]:
        """Return all figures of all ranks, by name."""
        return dict(zip(_PLACES, self._rows.T.tolist(), strict=True))

    def replaced(self, name: str, figures: npt.ArrayLike) -> RoundTable:
        """Return a copy of the table with other figures of that name."""
        other = RoundTable(self._rows, self.workers)
        other._rows[:, _PLACES[name]] = figures
        return other

    @property
    def total(self) -> int:
        """Samples used in the round by all ranks together."""
        return int(self.column("samples").sum())

    @property
    def work(self) -> npt.NDArray[np.float64]:
        """The work of each rank in the round, in samples of mean cost."""
        work, samples = self.column("work"), self.column("samples")
        return np.where(work > 0.0, work, samples)

    @property
    def transfer_s(self) -> float:
        """Seconds of transfers alone in the round before: the wait of the rank that came last. NaN: not known."""
        return float(self.column("wait_s").min())

    @property
    def busy_s(self) -> npt.NDArray[np.float64]:
        """Seconds that each rank was at work: what a plan can move from one rank to another."""
        return self.column("compute_s") + self.column("input_s")

    @property
    def unanimous(self) -> bool:
        """True if all ranks have the same bits of plan, place in the data, contents and settings."""
        common = self._rows[:, _COMMON].tobytes()
        return common == common[: len(common) // self.workers] * self.workers

    def disagreement(self, name: str, tolerance: float = 0.0) -> list[int]:
        """Return the ranks whose figure differs from rank 0's, to a relative tolerance. NaN agrees only with NaN."""
        figures = self.column(name)
        same = np.isclose(figures, figures[0], rtol=tolerance, atol=0.0, equal_nan=True)
        return [int(rank) for rank in np.flatnonzero(~same)]


@dataclass(frozen=True, slots=True)
class FinishedRound:
    """A round that all ranks have agreed on."""

    round: int
    epoch: int
    plan: RoundPlan
    """The plan of this very round, shortened where the epoch ends."""
    table: RoundTable
    elapsed_s: float
    """Seconds since the round before was agreed, on this rank's clock: the one figure that differs between ranks."""
    noise_scale: float = math.nan
    """The batch at which the gradient's noise is as large as the gradient; NaN: not known."""
