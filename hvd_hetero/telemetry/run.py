"""A recorded run, as arrays, read back from its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_hetero.columns import COLUMNS, written
from hvd_hetero.telemetry.reader import read_lines
from hvd_hetero.telemetry.records import SCHEMA, VERSION

_PER_ROUND = {
    **dict.fromkeys(("round", "epoch"), np.int64),
    **dict.fromkeys(("elapsed_s", "noise_scale", "recovered_s"), np.float64),
}
_PER_RANK = {
    "plan": np.int64,
    **{name: np.int64 if c.whole else np.float64 for name, c in COLUMNS.items() if c.written != "never"},
}


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run.

    Its columns are attributes, too: ``run.compute_s``. Those of the ranks (``hvd_hetero.columns`` and ``plan``) are
    (rounds, workers); ``round``, ``epoch``, ``elapsed_s``, ``noise_scale`` and ``recovered_s`` are (rounds,).
    """

    policy: str
    workers: int
    global_batch: int
    columns: Mapping[str, npt.NDArray[Any]] = field(repr=False)
    every: int = 1
    """The interval of the recorded rounds (``Telemetry(every=…)``)."""
    first_round: int = 0
    """The file's first round, which pays for the start; a resumed job counts on, so it need not be 0."""
    cut_short: bool = False
    """True if the file ends within a line, which is left out."""

    @classmethod
    def of(cls, policy: str, workers: int, global_batch: int, *, round: npt.ArrayLike, **given: Any) -> Run:
        """Return a run of these columns and settings; columns that are not given are 0."""
        rounds = len(np.asarray(round))
        shapes = {**dict.fromkeys(_PER_ROUND, (rounds,)), **dict.fromkeys(_PER_RANK, (rounds, workers))}
        columns = {
            name: np.broadcast_to(round if name == "round" else given.pop(name, 0), shapes[name]).astype(kind)
            for name, kind in {**_PER_ROUND, **_PER_RANK}.items()
        }
        return cls(policy, workers, global_batch, columns, **given)

    def __getattr__(self, name: str) -> npt.NDArray[Any]:
        """Return the column of that name."""
        if name == "columns" or name not in self.columns:  # a copy asks before there are any
            raise AttributeError(f"a run has no column {name!r}; it has {', '.join((*_PER_ROUND, *_PER_RANK))}")
        return self.columns[name]

    def replace(self, **changes: Any) -> Run:
        """Return the run with other columns or settings."""
        columns = {name: changes.pop(name, column) for name, column in self.columns.items()}
        return replace(self, columns=columns, **changes)

    def after(self, rounds: int) -> Run:
        """Return the run without its first ``rounds``, recorded or not."""
        return self.take(self.round >= self.round[:1] + rounds)

    def take(self, rounds: slice | npt.NDArray[np.bool_]) -> Run:
        """Return the run with these rounds only."""
        kept = {name: column[rounds] for name, column in self.columns.items()}
        return replace(self, columns=kept)

    @property
    def left_out(self) -> str:
        """What the record leaves out, in words; "" if it holds all rounds of the run."""
        return f"1 round of {self.every} is recorded" if self.every > 1 else ""

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


def read_run(path: str | Path) -> Run:
    """Read a telemetry file. A last line cut short, as a killed run leaves it, is ignored."""
    optional = frozenset({*written("sometimes"), "noise_scale", "recovered_s"})
    read = read_lines(path, SCHEMA, VERSION, _PER_ROUND, _PER_RANK, optional)
    rounds = read.columns["round"]
    return Run(
        policy=read.header["policy"],
        workers=read.header["workers"],
        global_batch=read.header["global_batch"],
        columns=read.columns,
        every=read.header["every"],
        first_round=int(rounds[0]) if len(rounds) else 0,
        cut_short=read.cut_short,
    )
