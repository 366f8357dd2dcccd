"""The record of a round, which rank 0 makes from the table that it has anyway. Schema: ``docs/telemetry.md``.

A round's waiting time travels with the next round's table, so a round is held back until that has come. The last round
of a run has no waiting time (``null``), and no times at all for ranks whose work is queued.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from hvd_hetero.columns import written
from hvd_hetero.rounds import FinishedRound, RoundTable

SCHEMA = "hvd-hetero/telemetry"
VERSION = 1

_LATE = ("compute_s", "input_s")
_EACH = {name: column.whole for name, column in written("always").items() if name != "wait_s"}  # which comes late
_SOMETIMES = tuple(written("sometimes"))  # in rounds in which some rank has them, to keep other lines short

logger = logging.getLogger(__name__)

Record: TypeAlias = dict[str, Any]
"""A line of telemetry: ``docs/telemetry.md`` has its keys."""
Listener: TypeAlias = Callable[[Record], object]


def _figures(table: RoundTable) -> dict[str, list[Any]]:
    """Return a record's figures from a table, with None for what is not known."""
    # Between two steps, NumPy has left the processor's caches: call it once. From 64 ranks on (arbitrary: there both
    # ways take about the same time) its arrays are faster than lists.
    if table.workers < 64:
        lists = table.lists()
        found = {name: any(lists[name]) for name in _SOMETIMES}
    else:
        found = {name: bool(table.column(name).any()) for name in _SOMETIMES}
        lists = {name: table.figures(name) for name in (*_EACH, *(name for name in _SOMETIMES if found[name]))}
    always = {name: list(map(round, lists[name])) if whole else _known(lists[name]) for name, whole in _EACH.items()}
    return always | {name: _known(lists[name]) for name in _SOMETIMES if found[name]}


def _known(figures: list[float]) -> list[float | None]:
    return [figure if math.isfinite(figure) else None for figure in figures]


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

    def __init__(self, file: Listener | None = None, *, every: int = 1) -> None:
        self._incomplete: Record | None = None
        self._laps: list[float] = []
        """``lap_s`` of the table that the held record is made of."""
        self._former: int | None = None
        """Round of the table before: a table may tell of several rounds."""
        self._since = -1
        """The last round before those that the incomplete record tells of."""
        self.recovered_s: float | None = None
        """Seconds of a recovery, for the record of the round that ends, which is made whatever ``every`` is."""
        self._listeners: list[_Listening] = []
        if file is not None:
            self.add(file, every, ours=True)

    def add(self, listener: Listener, every: int = 1, *, ours: bool = False) -> None:
        """Call ``listener(record)`` with every ``every``-th round's record; with the last one when the run is closed.

        The record is the listener's own, to keep or to change. ``ours``: the listener changes no record, so it gets no
        copy; and it is quick, so it is closed even if the process ends at once.
        """
        self._listeners.append(_Listening(listener, every, ours))

    def __call__(self, finished: FinishedRound) -> None:
        """Take a finished round, and hand out the previous one, which is now complete."""
        if self._incomplete is not None:
            self._complete(finished.table)
        recovered_s, self.recovered_s = self.recovered_s, None
        since = finished.round - 1
        if self._former is not None and self._former < since:  # else an earlier state was loaded
            since = self._former
        self._former = finished.round
        if recovered_s is None and not any(_due(finished.round, since, each) for each in self._listeners):
            return
        self._since = since
        self._incomplete = {
            "round": finished.round,
            "epoch": finished.epoch,
            "elapsed_s": finished.elapsed_s,
            "plan": list(finished.plan.samples),
            **_figures(finished.table),
        }
        if math.isfinite(finished.noise_scale):
            self._incomplete["noise_scale"] = finished.noise_scale
        if finished.round - since > 1:
            self._incomplete["rounds"] = finished.round - since
        self._laps = finished.table.figures("lap_s")
        if recovered_s is not None:
            self._incomplete["recovered_s"] = recovered_s

    def close(self) -> None:
        """Hand out the last round, as far as it is known, and close the listeners. A second call does nothing."""
        if self._incomplete is not None:
            for name in _LATE:
                self._fill_in(name, [math.nan] * len(self._laps))
            self._hand_out([None] * len(self._laps))
        listeners, self._listeners = self._listeners, []
        for each in listeners:
            _close(each.listener)

    def last_words(self) -> None:
        """Close only our own listeners: the process is about to end, and a user's function might not return."""
        self._listeners = [each for each in self._listeners if each.ours]
        self.close()

    def _complete(self, following: RoundTable) -> None:
        assert self._incomplete is not None, "the caller has looked"
        laps = following.figures("lap_s")
        if any(self._laps):
            for name in _LATE:  # a rank that has lost its stopwatch reports the following round
                late = zip(following.figures(name), laps, strict=True)
                self._fill_in(name, [seconds if lap else math.nan for seconds, lap in late])
        if 0.0 < laps[0] < math.inf:
            self._incomplete["elapsed_s"] = laps[0]
        self._hand_out(_known(following.figures("wait_s")))

    def _fill_in(self, name: str, late: list[float]) -> None:
        """Replace the times of ranks with a stopwatch, which the round's own table did not have."""
        assert self._incomplete is not None, "the caller has looked"
        now = self._incomplete[name]
        self._incomplete[name] = [
            then if lap else own for then, lap, own in zip(_known(late), self._laps, now, strict=True)
        ]

    def _hand_out(self, wait_s: list[float | None]) -> None:
        assert self._incomplete is not None, "the caller has looked"
        record, self._incomplete = {**self._incomplete, "wait_s": wait_s}, None
        number = record["round"]
        for each in tuple(self._listeners):
            if not _due(number, self._since, each) and "recovered_s" not in record:
                continue
            given = record if each.ours else _copy(record)
            if not _call_safely(each.listener, each.listener, given):
                self._listeners = [other for other in self._listeners if other is not each]
                _close(each.listener)


def _due(round: int, since: int, listening: _Listening) -> bool:
    """Return whether a multiple of what a listener asks for is among the rounds after ``since``."""
    return round // listening.every > since // listening.every


def _copy(record: Record) -> Record:
    """Return a copy for one listener, which may change it: others get what was measured."""
    return {name: value.copy() if isinstance(value, list) else value for name, value in record.items()}


def _close(listener: Listener) -> None:
    """Close a listener that can be closed: it may hold a file, or a line of the terminal."""
    if callable(close := getattr(listener, "close", None)):
        _call_safely(listener, close)


def _call_safely(listener: Listener, call: Callable[..., object], *arguments: Record) -> bool:
    """Call a function of a listener, and say in the log if that fails."""
    try:
        call(*arguments)
    except Exception:
        name = getattr(listener, "__qualname__", type(listener).__name__)
        logger.exception("%s has failed and is called no more; training goes on without it", name)
        return False
    return True
