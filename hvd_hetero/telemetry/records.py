"""One JSON line per round, written by rank 0 from the table that it has anyway. Schema: ``docs/telemetry.md``.

A round's waiting time travels with the next round's table, so the writer holds one round back and fills it in. The
last round of a run has no waiting time (``null``).
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
# Written only in rounds where some rank has them, to keep other lines short; 0 for a rank that has none.
_SOMETIMES = ("once_s", "fixed_samples", "limit", "slope_s", "intercept_s", "saturation")

logger = logging.getLogger(__name__)


def _plain(values: Iterable[float]) -> list[float | None]:
    """Return numbers for JSON, which has no NaN, with the seven digits of a float32."""
    return [float(f"{v:.7g}") if math.isfinite(v) else None for v in values]


class TelemetryWriter:
    """Write a run to a new file; an earlier file of that name gets another name.

    If the file fails, the telemetry ends with one warning, and the training goes on. At the start a path that cannot
    be written is an error, unless the training ``goes_on`` from before.
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
            if not goes_on:  # a mistake of the user, who should hear of it at once
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
        """Take a finished round, and write the previous one, which is now complete."""
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
        """Write the last round and close the file; a second call does nothing."""
        if self._file is not None:
            self._release([None] * (len(self._held["plan"]) if self._held else 0))
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:  # some file systems report a full disk only now
                self._warn(error)

    def _release(self, wait_s: list[float | None]) -> None:
        if self._held is not None:
            self._write({**self._held, "wait_s": wait_s})
            self._held = None

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            # Each line is flushed, so that a killed run keeps its rounds.
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            self._warn(error)
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # closing tries to write the rest to the same full disk
                file.close()

    def _warn(self, error: OSError) -> None:
        logger.warning("telemetry ends here, training goes on: cannot write %s: %s", self._path, error)


def _keep_former(path: Path) -> None:
    """Rename an earlier run at this path to the next free number.

    One file cannot hold both runs, because the number of ranks may differ.
    """
    if path.is_file() and path.stat().st_size:
        names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
        kept = next(name for name in names if not name.exists())
        path.rename(kept)
        logger.warning("%s exists already, and is kept as %s", path, kept.name)


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
    """Of ``compute_s`` and ``input_s``, what comes once a round; 0: not known."""
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

    def after(self, rounds: int) -> Run:
        """Return the run without its first ``rounds``."""
        return self.take(slice(rounds, None))

    def take(self, rounds: slice | npt.NDArray[np.bool_]) -> Run:
        """Return the run with these rounds only."""
        kept = {n: getattr(self, n)[rounds] for n in (*_PER_ROUND, *_PER_RANK)}
        return Run(self.policy, self.workers, self.global_batch, **kept)

    @property
    def throughput(self) -> float:
        """Samples per second, leaving out round 0, which pays for the start."""
        counted = self._without_start(np.ones(len(self.round), bool))
        return float(self.samples[counted].sum() / self.elapsed_s[counted].sum())

    @property
    def waiting_share(self) -> npt.NDArray[np.float64]:
        """Each rank's share of time spent waiting for others or for the network, leaving out round 0."""
        known = self._without_start(np.asarray(np.isfinite(self.wait_s).all(axis=1)))
        return np.asarray(self.wait_s[known].sum(axis=0) / self.elapsed_s[known].sum())

    def _without_start(self, rounds: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Leave out round 0, unless it is the only one."""
        later = rounds & (self.round > 0)
        return later if later.any() else rounds


_PER_ROUND: dict[str, type] = {"round": np.int64, "epoch": np.int64, "elapsed_s": np.float64}
_PER_RANK: dict[str, type] = {
    **dict.fromkeys(("plan", *_COUNTS), np.int64),
    **dict.fromkeys((*_FIGURES, "wait_s", "once_s", "fixed_samples"), np.float64),
    "limit": np.int64,
    **dict.fromkeys(("slope_s", "intercept_s", "saturation"), np.float64),
}


def read_run(path: str | Path) -> Run:
    """Read a telemetry file. A last line cut short, as a killed run leaves it, is ignored."""
    header, columns = read_lines(path, SCHEMA, VERSION, _PER_ROUND, _PER_RANK, frozenset(_SOMETIMES))
    return Run(policy=header["policy"], workers=header["workers"], global_batch=header["global_batch"], **columns)
