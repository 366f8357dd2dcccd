"""One JSON line per round, written by rank 0 from the table that it holds anyway. Schema: ``docs/telemetry.md``.

The waiting time of a round travels with the table of the round after it, so the writer holds one round back and fills
it in; the last round of a run has no waiting time (``null``).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from hvd_hetero.measurement.memory_limits import HEADROOM
from hvd_hetero.rounds import FinishedRound
from hvd_hetero.telemetry.lines import read_lines

__all__ = ["SCHEMA", "VERSION", "Run", "TelemetryWriter", "read_run"]

SCHEMA = "hvd-hetero/telemetry"
VERSION = 1

_COUNTS = ("samples", "micro_batches")
_FIGURES = ("compute_s", "input_s", "samples_per_s", "cpu", "memory")
# Written only in rounds where some rank has them, so that runs without them have short lines; 0 where one has not.
_SOMETIMES = ("uncertainty", "fixed_samples", "limit", "slope_s", "intercept_s", "saturation")

logger = logging.getLogger(__name__)


def _plain(values: Iterable[float]) -> list[float | None]:
    """Numbers for JSON, which has no NaN: seven digits, as many as a float32 carries."""
    return [float(f"{v:.7g}") if math.isfinite(v) else None for v in values]


class TelemetryWriter:
    """Writes a run to a file, which is made anew; a former file of that name is kept under another.

    Trouble with the file ends the telemetry, with one warning, and never the training. A path that cannot be written
    from the start is an error, unless the training ``goes_on`` from before.
    """

    def __init__(
        self, path: str | Path, *, policy: str, workers: int, global_batch: int, goes_on: bool = False
    ) -> None:
        self._path = Path(path)
        self._held: dict[str, Any] | None = None
        self._file: TextIO | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _keep_former(self._path)
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            if not goes_on:  # the user's mistake, which is told at once
                raise
            self._warn(error)
        self._write(
            {
                "schema": SCHEMA,
                "version": VERSION,
                "policy": policy,
                "workers": workers,
                "global_batch": global_batch,
                "headroom": HEADROOM,
            }
        )

    def __call__(self, finished: FinishedRound) -> None:
        """Take a finished round; the one before it is now complete and is written."""
        self._release(_plain(finished.table.figures("wait_s")))
        self._held = {
            "round": finished.round,
            "epoch": finished.epoch,
            "elapsed_s": float(f"{finished.elapsed_s:.7g}"),
            "plan": list(finished.plan.samples),
            **{name: [int(v) for v in finished.table.figures(name)] for name in _COUNTS},
            **{name: _plain(finished.table.figures(name)) for name in _FIGURES},
            **{name: _plain(column) for name in _SOMETIMES if any(column := finished.table.figures(name))},
        }

    def close(self) -> None:
        """Write the last round and close the file. May be called twice."""
        if self._file is not None:
            self._release([None] * (len(self._held["plan"]) if self._held else 0))
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:  # some file systems tell only now that the disk is full
                self._warn(error)

    def _release(self, wait_s: list[float | None]) -> None:
        if self._held is not None:
            self._write({**self._held, "wait_s": wait_s})
            self._held = None

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            # Flushed line by line, so that a killed run keeps what it had.
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            self._warn(error)
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # closing tries to write what is left, on the same full disk
                file.close()

    def _warn(self, error: OSError) -> None:
        logger.warning("telemetry ends here, training goes on: cannot write %s: %s", self._path, error)


def _keep_former(path: Path) -> None:
    """Give what is in the way a name with a number, the next that is free: an earlier run, or one before a restart.

    One file cannot hold both, for the number of ranks may differ.
    """
    if path.is_file() and path.stat().st_size:
        names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
        kept = next(name for name in names if not name.exists())
        path.rename(kept)
        logger.warning("%s is there already, and is kept as %s", path, kept.name)


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run. Arrays are (rounds, workers), or (rounds,) where the figure belongs to the round."""

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
    uncertainty: npt.NDArray[np.float64]
    """0 where a predicted speed was to be taken as it is"""
    fixed_samples: npt.NDArray[np.float64]
    """0 where it is not known what a micro-batch costs besides its samples"""
    limit: npt.NDArray[np.int64]
    """0 where nothing has failed to fit in memory"""
    slope_s: npt.NDArray[np.float64]
    """0 where no curve is known, as the other two"""
    intercept_s: npt.NDArray[np.float64]
    saturation: npt.NDArray[np.int64]

    def after(self, rounds: int) -> Run:
        """The same run without its first rounds."""
        per_round = {n: getattr(self, n)[rounds:] for n in (*_PER_ROUND, *_PER_RANK)}
        return Run(self.policy, self.workers, self.global_batch, **per_round)

    @property
    def throughput(self) -> float:
        """Samples per second, without round 0, which pays for the start."""
        counted = self._without_start(np.ones(len(self.round), bool))
        return float(self.samples[counted].sum() / self.elapsed_s[counted].sum())

    @property
    def waiting_share(self) -> npt.NDArray[np.float64]:
        """Per rank: the share of the time spent waiting for the others or for the network, without round 0."""
        known = self._without_start(np.asarray(np.isfinite(self.wait_s).all(axis=1)))
        return np.asarray(self.wait_s[known].sum(axis=0) / self.elapsed_s[known].sum())

    def _without_start(self, rounds: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """These rounds but round 0, unless it is the only one."""
        later = rounds & (self.round > 0)
        return later if later.any() else rounds


_PER_ROUND: dict[str, type] = {"round": np.int64, "epoch": np.int64, "elapsed_s": np.float64}
_PER_RANK: dict[str, type] = {
    **dict.fromkeys(("plan", *_COUNTS), np.int64),
    **dict.fromkeys((*_FIGURES, "wait_s", "uncertainty", "fixed_samples"), np.float64),
    **dict.fromkeys(("limit", "saturation"), np.int64),
    **dict.fromkeys(("slope_s", "intercept_s"), np.float64),
}


def read_run(path: str | Path) -> Run:
    """Read a file of telemetry. A line cut short at the very end, of a run that was killed, is left out."""
    header, columns = read_lines(path, SCHEMA, VERSION, _PER_ROUND, _PER_RANK, frozenset(_SOMETIMES))
    return Run(policy=header["policy"], workers=header["workers"], global_batch=header["global_batch"], **columns)
