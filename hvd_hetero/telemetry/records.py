"""The record of a round, which rank 0 makes from the table that it has anyway. Schema: ``docs/telemetry.md``.

A round's waiting time travels with the next round's table, so a round is held back until that has come. The last round
of a run has no waiting time (``null``), and no times at all for ranks whose work is queued.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_hetero.rounds import FinishedRound, RoundTable
from hvd_hetero.telemetry.files import named
from hvd_hetero.telemetry.reader import read_lines
from hvd_hetero.telemetry.recoveries import Recovery
from hvd_hetero.telemetry.rotation import joined, parts_of

__all__ = ["SCHEMA", "VERSION", "Listener", "Record", "Recorder", "Run", "read_run"]

SCHEMA = "hvd-hetero/telemetry"
VERSION = 1

_COUNTS = ("samples", "micro_batches")
_LATE = ("compute_s", "input_s")
_FIGURES = (*_LATE, "samples_per_s", "cpu", "memory")
# Written only in rounds in which some rank has them, to keep other lines short; 0 for a rank that has none.
_HINDRANCES = ("throttled", "quota_cores", "contended", "stolen", "stalled", "faults_per_s", "collecting")
_SOMETIMES = (
    *("once_s", "fixed_samples", "limit", "slope_s", "intercept_s", "saturation"),
    *(*_HINDRANCES, "clock", "sent_mb_s"),
)

_MANY = 64  # ranks, from which on figures are taken all at once (arbitrary: there, both ways take about the same time)

logger = logging.getLogger(__name__)

Record: TypeAlias = dict[str, Any]
"""A line of telemetry: ``docs/telemetry.md`` has its keys."""
Listener: TypeAlias = Callable[[Record], object]


def _figures(table: RoundTable) -> dict[str, list[Any]]:
    """Return a record's figures from a table, with None for what is not known."""
    if table.workers < _MANY:  # between two steps, NumPy has left the processor's caches: call it once
        lists = table.lists()
        names = (*_FIGURES, *(name for name in _SOMETIMES if any(lists[name])))
        return {n: list(map(round, lists[n])) for n in _COUNTS} | {n: _known(lists[n]) for n in names}
    names = (*_FIGURES, *(name for name in _SOMETIMES if table.column(name).any()))
    counts = {name: np.rint(table.column(name)).astype(int).tolist() for name in _COUNTS}
    return counts | {name: _known(table.figures(name)) for name in names}


def _known(figures: list[float]) -> list[float | None]:
    return [figure if math.isfinite(figure) else None for figure in figures]


class RecordsFile(Protocol):
    """The writer of a run's records."""

    def __call__(self, record: Record) -> None:
        """Write a record."""

    def close(self) -> None:
        """Close the file."""


class _Listening(NamedTuple):
    listener: Listener
    every: int
    ours: bool


class Recorder:
    """Make the record of each finished round, and hand it to the file of the run and to listeners.

    A round's waiting is known one round later, and so are all its times where work is queued. So each record is held
    back until then. A listener that raises is closed and dropped with one message: a listener must not end a
    training, or end it on one rank alone.
    """

    def __init__(self, file: RecordsFile | None = None, *, every: int = 1) -> None:
        self._held: Record | None = None
        self._laps: list[float] = []
        """``lap_s`` of the table that the held record is made of."""
        self._former: int | None = None
        """Round of the table before: a table may tell of several rounds."""
        self._since = -1
        """The same, of the held record."""
        self.recovery: Record | None = None
        """What goes into the record of the round that ends; such a round is recorded whatever ``every`` is."""
        self._listeners: list[_Listening] = []
        if file is not None:
            self.add(file, every, ours=True)

    def add(self, listener: Listener, every: int = 1, *, ours: bool = False) -> None:
        """Call ``listener(record)`` with every ``every``-th round's record; with the last one when the run is closed.

        The record is the listener's own, to keep or to change. One of ``ours`` changes none, and spares the copy. It is
        quick, whatever happens, and so hears of the end even if the process has no time.
        """
        self._listeners.append(_Listening(listener, every, ours))

    def __call__(self, finished: FinishedRound) -> None:
        """Take a finished round, and hand out the previous one, which is now complete."""
        if self._held is not None:
            self._complete(finished.table)
        recovery, self.recovery = self.recovery, None
        since = finished.round - 1
        if self._former is not None and self._former < since:  # else an earlier state was loaded
            since = self._former
        self._former = finished.round
        if recovery is None and not any(_due(finished.round, since, each) for each in self._listeners):
            return
        self._since = since
        self._held = {
            "round": finished.round,
            "epoch": finished.epoch,
            "elapsed_s": finished.elapsed_s,
            "plan": list(finished.plan.samples),
            **_figures(finished.table),
        }
        if finished.round - since > 1:
            self._held["rounds"] = finished.round - since
        self._laps = finished.table.figures("lap_s")
        if recovery is not None:
            self._held["recovery"] = recovery

    def close(self) -> None:
        """Hand out the last round, as far as it is known, and close the listeners. A second call does nothing."""
        if self._held is not None:
            for name in _LATE:
                self._take(name, [math.nan] * len(self._laps))
            self._release([None] * len(self._laps))
        listeners, self._listeners = self._listeners, []
        for each in listeners:
            _close(each.listener)

    def last_words(self) -> None:
        """Close only our own listeners: the process is about to end, and a user's function might not return."""
        self._listeners = [each for each in self._listeners if each.ours]
        self.close()

    def _complete(self, following: RoundTable) -> None:
        assert self._held is not None, "the caller has looked"
        laps = following.figures("lap_s")
        if any(self._laps):
            for name in _LATE:  # a rank that has lost its stopwatch reports the following round
                told = zip(following.figures(name), laps, strict=True)
                self._take(name, [seconds if lap else math.nan for seconds, lap in told])
        if 0.0 < laps[0] < math.inf:
            self._held["elapsed_s"] = laps[0]
        self._release(_known(following.figures("wait_s")))

    def _take(self, name: str, late: list[float]) -> None:
        """Replace the times of ranks with a stopwatch, which the round's own table did not have."""
        assert self._held is not None, "the caller has looked"
        now = self._held[name]
        self._held[name] = [then if lap else own for then, lap, own in zip(_known(late), self._laps, now, strict=True)]

    def _release(self, wait_s: list[float | None]) -> None:
        assert self._held is not None, "the caller has looked"
        record, self._held = {**self._held, "wait_s": wait_s}, None
        number = record["round"]
        for each in tuple(self._listeners):
            if not _due(number, self._since, each) and "recovery" not in record:
                continue
            given = record if each.ours else _copy(record)
            if not _went_well(each.listener, each.listener, given):
                self._listeners = [other for other in self._listeners if other is not each]
                _close(each.listener)


def _due(round: int, since: int, listening: _Listening) -> bool:
    """Return whether a multiple of what a listener asks for is among the rounds after ``since``."""
    return round // listening.every > since // listening.every


def _copy(record: Record) -> Record:
    """Return a copy for one listener, which may change it: others get what was measured."""
    own = {name: value.copy() if isinstance(value, list) else value for name, value in record.items()}
    return own | {"recovery": _copy(record["recovery"])} if "recovery" in record else own


def _close(listener: Listener) -> None:
    """Close a listener that can be closed: it may hold a file, or a line of the terminal."""
    if callable(close := getattr(listener, "close", None)):
        _went_well(listener, close)


def _went_well(listener: Listener, call: Callable[..., object], *arguments: Record) -> bool:
    """Call a function of a listener, and say in the log if that fails."""
    try:
        call(*arguments)
    except Exception:
        name = getattr(listener, "__qualname__", type(listener).__name__)
        logger.exception("%s has failed and is called no more; training goes on without it", name)
        return False
    return True


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run. Arrays are (rounds, workers), or (rounds,) for figures of the whole round."""

    policy: str
    workers: int
    global_batch: int
    round: npt.NDArray[np.int64]
    epoch: npt.NDArray[np.int64]
    elapsed_s: npt.NDArray[np.float64]
    plan: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    micro_batches: npt.NDArray[np.int64]
    compute_s: npt.NDArray[np.float64]
    input_s: npt.NDArray[np.float64]
    wait_s: npt.NDArray[np.float64]
    samples_per_s: npt.NDArray[np.float64]
    cpu: npt.NDArray[np.float64]
    memory: npt.NDArray[np.float64]
    once_s: npt.NDArray[np.float64]
    """The part of ``compute_s`` and ``input_s`` that comes once a round; 0: not known."""
    fixed_samples: npt.NDArray[np.float64]
    """Fixed cost of a micro-batch, in samples that would take as long; 0: not known."""
    limit: npt.NDArray[np.int64]
    """Largest micro-batch that memory is known to allow; 0: none has failed."""
    slope_s: npt.NDArray[np.float64]
    """Seconds per sample beyond saturation; 0: no curve is known."""
    intercept_s: npt.NDArray[np.float64]
    """Fixed seconds of a micro-batch; 0: no curve is known."""
    saturation: npt.NDArray[np.float64]
    """Samples below which a micro-batch takes no less time; 0: no curve is known."""
    throttled: npt.NDArray[np.float64]
    """Share of its time in which a quota held the rank back."""
    quota_cores: npt.NDArray[np.float64]
    """Cores that the strictest quota allows; 0: there is none."""
    contended: npt.NDArray[np.float64]
    """Share of its time in which other processes ran in the rank's place."""
    stolen: npt.NDArray[np.float64]
    """Share of its cores' busy time that the hypervisor took."""
    stalled: npt.NDArray[np.float64]
    """Share of time in which the rank waited for memory."""
    faults_per_s: npt.NDArray[np.float64]
    """Pages that the rank had to read back from disk, per second."""
    collecting: npt.NDArray[np.float64]
    """Share of time in Python's garbage collector."""
    clock: npt.NDArray[np.float64]
    """Frequency of its core as a share of the highest; 0: not known."""
    sent_mb_s: npt.NDArray[np.float64]
    """Megabytes per second that its host, or its container, sent to others; 0: not known, or nothing."""
    every: int = 1
    """The interval of the recorded rounds (``Telemetry(every=…)``)."""
    files_missing: int = 0
    """Files of this run that are gone (``Telemetry(rotate_bytes=…)``)."""
    first_round: int = 0
    """The file's first round, which pays for the start; a resumed job counts on, so it need not be 0."""
    files: tuple[Path, ...] = ()
    """The files that it was read from, in order."""
    cut_short: tuple[Path, ...] = ()
    """The files that end within a line, which is left out."""
    recoveries: tuple[Recovery, ...] = ()
    """How long changes of ranks took, step by step."""

    def after(self, rounds: int) -> Run:
        """Return the run without its first ``rounds``, recorded or not."""
        return self.take(self.round >= self.round[:1] + rounds)

    def take(self, rounds: slice | npt.NDArray[np.bool_]) -> Run:
        """Return the run with these rounds only."""
        kept = {n: getattr(self, n)[rounds] for n in (*_PER_ROUND, *_PER_RANK)}
        return replace(self, **kept, recoveries=tuple(r for r in self.recoveries if r.round in kept["round"]))

    @property
    def left_out(self) -> str:
        """What the record leaves out, in words; "" if it holds all rounds of the run."""
        thin = f"1 round of {self.every} is recorded" if self.every > 1 else ""
        are = "is" if self.files_missing == 1 else "are"
        gone = f"{self.files_missing} of its files {are} missing" if self.files_missing else ""
        return " and ".join(filter(None, (thin, gone)))

    @property
    def throughput(self) -> float:
        """Samples per second, leaving out the first round, which pays for the start."""
        counted = self._without_start(np.ones(len(self.round), bool))
        return float(self.samples[counted].sum() / self.elapsed_s[counted].sum())

    @property
    def waiting_share(self) -> npt.NDArray[np.float64]:
        """Each rank's share of time spent waiting for others or for the network, without the first round."""
        known = self._without_start(np.asarray(np.isfinite(self.wait_s).all(axis=1)))
        return np.asarray(self.wait_s[known].sum(axis=0) / self.elapsed_s[known].sum())

    def _without_start(self, rounds: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Leave out the first round, unless it is the only one."""
        later = rounds & (self.round > self.first_round)
        return later if later.any() else rounds


_PER_ROUND: dict[str, type] = {"round": np.int64, "epoch": np.int64, "elapsed_s": np.float64}
_PER_RANK: dict[str, type] = {
    **dict.fromkeys(("plan", *_COUNTS), np.int64),
    **dict.fromkeys((*_FIGURES, "wait_s", "once_s", "fixed_samples"), np.float64),
    "limit": np.int64,
    **dict.fromkeys(("slope_s", "intercept_s", "saturation", *_HINDRANCES, "clock", "sent_mb_s"), np.float64),
}


def read_run(path: str | Path) -> Run:
    """Read a telemetry file, with the other files of its run if it was written in several.

    A last line cut short, as a killed run leaves it, is ignored.
    """
    for _ in range(2):  # again if another file of a run that goes on began in between
        found = parts_of(Path(path), SCHEMA)
        read = [read_lines(p, SCHEMA, VERSION, _PER_ROUND, _PER_RANK, frozenset(_SOMETIMES)) for p in found.paths]
        if same := found.still(part.header for part in read):
            break
    if not same:
        raise ValueError(f"{named(path)} begins another file too often to be read; read it when the run has ended")
    header, columns = joined(found.paths, read)
    return Run(
        policy=header["policy"],
        workers=header["workers"],
        global_batch=header["global_batch"],
        **columns,
        every=header["every"],
        files_missing=found.missing,
        first_round=int(columns["round"][0]) if len(columns["round"]) else 0,
        files=tuple(found.paths),
        cut_short=tuple(path for path, part in zip(found.paths, read, strict=True) if part.cut_short),
        recoveries=tuple(recovery for part in read for recovery in part.recoveries),
    )
