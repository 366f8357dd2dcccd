"""A recorded run as a timeline of all ranks, in the Trace Event Format that Perfetto and Chrome open.

A round ends on all ranks at once, when the sums have arrived, and that moment is known on rank 0's clock. So with T_r
the sum of ``elapsed_s`` up to round r, rank i's row holds, one after the other and up to T_r,

    input  input_s         compute  compute_s         wait  wait_s

and before them, in what is left since T_{r-1}, nothing: the user's own code between rounds. The order inside a round is
a convention, because the record has only sums. If clocks differ so that the three do not fit into the round, the first
ones are cut; the seconds measured are in the arguments of each slice.

All times are whole microseconds, so that neighbours share their edges exactly in whatever reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from hvd_hetero.telemetry.files import check_output, named, write_whole
from hvd_hetero.telemetry.run import Run

__all__ = ["MOST_EVENTS", "check_timeline", "events", "write_timeline"]

MOST_EVENTS = 3_000_000
"""The most events that Perfetto still opens in a browser (arbitrary): 1,000 rounds of 1,000 ranks have as many."""

_BEGIN = '{"displayTimeUnit":"ms","traceEvents":['
_PROCESS = 1
_ROUNDS = 1  # thread 0 is the kernel's idle one to Perfetto
_FIRST_RANK = 2


def check_timeline(path: Path, name: str = "path") -> None:
    """Raise if a timeline cannot be written there, or something else than an earlier one is there."""
    check_output(path, name, "timeline", lambda begin: begin.startswith(_BEGIN.encode()))


def write_timeline(run: Run, path: str | Path) -> int:
    """Write a run, or a part of one, to a file for https://ui.perfetto.dev; return the number of events.

    An earlier timeline there is replaced, and any other file is an error.
    """
    most = 4 + len(run.round) * (2 + 3 * run.workers) + run.workers
    if most > MOST_EVENTS:
        fit = max((MOST_EVENTS - 4 - run.workers) // (2 + 3 * run.workers), 1)
        raise ValueError(
            f"{len(run.round)} rounds of {run.workers} ranks are up to {most} events; {MOST_EVENTS} are the most, so "
            f"take fewer rounds: --rounds {run.round[0]}:{run.round[0] + fit * run.every}"
        )
    if not np.isfinite(run.elapsed_s).all() or (run.elapsed_s < 0).any():
        raise ValueError(f"elapsed_s must be at least 0 in every round, to write {named(path)}; mend the run's file")
    check_timeline(Path(path))
    with write_whole(Path(path)) as file:
        return _write(file, events(run))


def _write(file: IO[str], made: Iterator[dict[str, Any]]) -> int:
    number = 0
    file.write(f"{_BEGIN}\n")
    for number, event in enumerate(made, start=1):
        file.write(",\n" if number > 1 else "")
        file.write(json.dumps(event, separators=(",", ":")))
    file.write("\n]}\n")
    return number


def events(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the names of the rows, and then the events, round by round."""
    yield _name("process_name", 0, f"{run.policy}, {run.workers} ranks, {run.global_batch} samples a round")
    yield _name("thread_name", _ROUNDS, "rounds")
    for rank in range(run.workers):
        yield _name("thread_name", _FIRST_RANK + rank, f"rank {rank}")
    ends = np.rint(1e6 * np.cumsum(run.elapsed_s)).astype(np.int64)
    begins = np.concatenate([[0], ends[:-1]])
    for i in range(len(run.round)):
        begin, end = int(begins[i]), int(ends[i])
        told = {"epoch": int(run.epoch[i]), "samples": int(run.samples[i].sum())}
        yield _slice(f"round {run.round[i]}", _ROUNDS, begin, end, told)
        if run.elapsed_s[i] > 0:
            rate = float(f"{run.samples[i].sum() / run.elapsed_s[i]:.7g}")
            yield {"ph": "C", "name": "speed", "pid": _PROCESS, "ts": begin, "args": {"samples/s": rate}}
        for rank in range(run.workers):
            yield from _of_rank(run, i, rank, begin, end)


def _of_rank(run: Run, i: int, rank: int, begin: int, end: int) -> Iterator[dict[str, Any]]:
    """Yield the slices of one rank in one round."""
    seconds = [float(figure[i, rank]) for figure in (run.input_s, run.compute_s, run.wait_s)]
    lasting = np.rint(1e6 * np.clip(np.nan_to_num(seconds), 0.0, 1e9)).astype(np.int64)
    if not np.isfinite(seconds[2]):  # the last round: what follows the work is not known
        end = min(end, begin + int(lasting.sum()))
    edges = np.maximum(end - np.append(np.cumsum(lasting[::-1])[::-1], 0), begin).tolist()
    did = {
        "samples": int(run.samples[i, rank]),
        "planned": int(run.plan[i, rank]),
        "micro_batches": int(run.micro_batches[i, rank]),
    }
    for name, measured, start, stop in zip(("input", "compute", "wait"), seconds, edges, edges[1:], strict=False):
        if stop > start:
            yield _slice(
                name, _FIRST_RANK + rank, start, stop, {"seconds": measured, **(did if name == "compute" else {})}
            )


def _slice(name: str, thread: int, begin: int, end: int, told: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": _PROCESS, "tid": thread, "ts": begin, "dur": end - begin, "args": told}


def _name(kind: str, thread: int, name: str) -> dict[str, Any]:
    row = {"tid": thread} if thread else {}
    return {"ph": "M", "name": kind, "pid": _PROCESS, **row, "args": {"name": name}}
