"""A recorded run, as arrays, read back from its files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hvd_hetero.telemetry.reader import read_lines
from hvd_hetero.telemetry.records import COSTS, COUNTS, FIGURES, HINDRANCES, SCHEMA, SOMETIMES, VERSION

__all__ = ["Run", "read_run"]


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
    work: npt.NDArray[np.float64]
    """Samples, each as many as it costs of a mean one; 0: all cost the same. The figures that follow are 0, too."""
    cost_number: npt.NDArray[np.float64]
    """What a sample costs besides its length, for a mean sample that costs 1."""
    cost_length: npt.NDArray[np.float64]
    """What it costs for each unit of its length."""
    cost_square: npt.NDArray[np.float64]
    """What it costs for each unit of its length's square."""
    cost_padded: npt.NDArray[np.float64]
    """What a batch costs for each unit of its samples' number times its longest."""
    cost_padded_square: npt.NDArray[np.float64]
    """What it costs for each unit of its samples' number times its longest's square."""
    padding: npt.NDArray[np.float64]
    """Share of the rank's work that went into filling batches up to their longest sample."""
    by_number: npt.NDArray[np.float64]
    """Time of the latest rank with samples divided by number, over what it is by cost."""
    noise_scale: npt.NDArray[np.float64]
    """The batch at which the gradient's noise is as large as the gradient; 0: not known."""
    recovered_s: npt.NDArray[np.float64]
    """Seconds of the recovery that ended with this round, on rank 0; 0: there was none."""
    every: int = 1
    """The interval of the recorded rounds (``Telemetry(every=…)``)."""
    first_round: int = 0
    """The file's first round, which pays for the start; a resumed job counts on, so it need not be 0."""
    cut_short: bool = False
    """True if the file ends within a line, which is left out."""

    def after(self, rounds: int) -> Run:
        """Return the run without its first ``rounds``, recorded or not."""
        return self.take(self.round >= self.round[:1] + rounds)

    def take(self, rounds: slice | npt.NDArray[np.bool_]) -> Run:
        """Return the run with these rounds only."""
        kept = {n: getattr(self, n)[rounds] for n in (*_PER_ROUND, *_PER_RANK)}
        return replace(self, **kept)

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


_PER_ROUND: dict[str, type] = {
    "round": np.int64,
    "epoch": np.int64,
    "elapsed_s": np.float64,
    "noise_scale": np.float64,
    "recovered_s": np.float64,
}
_PER_RANK: dict[str, type] = {
    **dict.fromkeys(("plan", *COUNTS), np.int64),
    **dict.fromkeys((*FIGURES, "wait_s", "once_s", "fixed_samples"), np.float64),
    "limit": np.int64,
    **dict.fromkeys(("slope_s", "intercept_s", "saturation", *HINDRANCES, "clock", "sent_mb_s", *COSTS), np.float64),
}


def read_run(path: str | Path) -> Run:
    """Read a telemetry file. A last line cut short, as a killed run leaves it, is ignored."""
    optional = frozenset({*SOMETIMES, "noise_scale", "recovered_s"})
    read = read_lines(path, SCHEMA, VERSION, _PER_ROUND, _PER_RANK, optional)
    rounds = read.columns["round"]
    return Run(
        policy=read.header["policy"],
        workers=read.header["workers"],
        global_batch=read.header["global_batch"],
        **read.columns,
        every=read.header["every"],
        first_round=int(rounds[0]) if len(rounds) else 0,
        cut_short=read.cut_short,
    )
