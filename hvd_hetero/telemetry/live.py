"""Rank 0's view of a training while it runs: ``LoadBalance(progress=True)``.

There is no thread: the view is a listener, and writes a line to standard error at most once in ten seconds, when a
record comes. On a terminal the line takes the place of a progress bar, which its owner then draws again below it.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import TextIO

from hvd_hetero.telemetry.changes import LISTED_RANKS
from hvd_hetero.telemetry.records import Record

_CLEAR = "\r\x1b[2K"  # what a progress bar has drawn in this line


class LiveView:
    """A listener that writes lines with rounds, samples per second, waiting and batches."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._next_s = -math.inf
        self._records = 0
        self._samples = self._elapsed_s = self._known_s = 0.0
        self._wait_s: list[float] = []

    def __call__(self, record: Record) -> None:
        """Take a round into account, and write a line if the last one is long enough ago."""
        self._learn(record)
        now = self._clock()
        if now >= self._next_s:
            self._next_s = now + 10.0
            stream = self._stream or sys.stderr
            stream.write(f"{_CLEAR if stream.isatty() else ''}{self._text(record)}\n")
            stream.flush()

    def _learn(self, record: Record) -> None:
        self._records += 1
        # The first round that is seen pays for the start, and counts only until there is another. Figures cover the
        # last ten rounds or so.
        kept = 0.0 if self._records == 2 else 0.9
        elapsed_s = record["elapsed_s"]
        self._samples = kept * self._samples + sum(record["samples"])
        self._elapsed_s = kept * self._elapsed_s + elapsed_s
        if record["wait_s"][0] is not None:  # only the last record of a run does not know it
            self._known_s = kept * self._known_s + elapsed_s
            before = self._wait_s or [0.0] * len(record["wait_s"])
            self._wait_s = [kept * old + (new or 0.0) for old, new in zip(before, record["wait_s"], strict=True)]

    def _text(self, record: Record) -> str:
        shares = [wait / self._known_s if self._known_s > 0 else 0.0 for wait in self._wait_s] or [0.0]
        most = shares.index(max(shares))
        worst = f", rank {most} most: {shares[most]:.0%}" if len(shares) > 1 else ""
        rate = self._samples / self._elapsed_s if self._elapsed_s > 0 else 0.0
        return (
            f"hvd-hetero: round {record['round']:,} of epoch {record['epoch']:,} · {rate:,.0f} samples/s · "
            f"waiting {statistics.fmean(shares):.0%}{worst} · batches {_batches(record['samples'])}{_memory(record)}"
        )


def _memory(record: Record) -> str:
    """Return what ranks hold at most, and the peaks of their memory, as far as known."""
    limits, peaks = ([round(of) for of in record.get(name, [])] for name in ("limit", "memory_peak_mib"))
    return (f" of at most {_batches(limits)}" if limits else "") + (f", {_batches(peaks)} MiB" if peaks else "")


def _batches(samples: list[int]) -> str:
    if len(samples) <= LISTED_RANKS:
        return " ".join(map(str, samples))
    return f"{min(samples)} to {max(samples)}, median {statistics.median(samples):g}"
