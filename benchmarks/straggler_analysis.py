"""ByteDance's traces of stragglers: the slowdowns that their authors computed, beside a report's.

    git clone https://github.com/ByteDance-Seed/StragglerAnalysis
    python benchmarks/straggler_analysis.py StragglerAnalysis/data [--write]

"Understanding Stragglers in Large Model Training Using What-if Analysis" (2025) published three traces of jobs with
data and pipeline parallelism, named by what is wrong: AR (one worker is slow), ST (the last stage is long), SE
(sequences differ in length). Read are ``timeline-*.json.gz``, the traces, and ``result-*``, ``mw-*`` and ``ms-*.json``,
their authors' figures. Nothing of theirs is kept here.

**Theirs.** S is the mean time of a step over that of a step in which every operation takes the mean of its kind (over
pipelines, stages and steps), in a replay of all dependencies. S_d is the same if pipeline d alone keeps its own times,
S_s if stage s does. M_W is the share of the slowdown that goes away with the slowest 3 % of the workers; M_S with the
last stage.

**Ours** knows ranks that do the same work and then meet. So a rank is here

    a pipeline: it is done when its last micro-batch is (its bubbles are its own time), then pipelines sum gradients;
    a worker: its time is its forward and backward computing, and all else in the step is waiting.

The slowdown that ranks cause is sum_k max_i t_ik / sum_k T_k (``report.attribution``), where T is the time in which the
ranks could have done the same samples together, each at its own speed: n / sum_i (1 / t_ik). The third column has the
mean of t in the place of T, as theirs. Transfers are left out of all three.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _report import write_result
from numpy.typing import NDArray

from hvd_hetero.telemetry import Run
from hvd_hetero.tools.report.figures import Figures, figures

TRACES = ("AR", "ST", "SE")
COMPUTING = ("forward-compute", "backward-compute")

WHY = """\
Where the definitions differ:

- Their ideal gives each operation the mean time of its kind, and keeps the order of a pipeline. Ours lets ranks do each
  other's samples, each at its speed, which is sooner than the mean.
- One slow worker (AR) holds up its whole pipeline. As pipelines, the mean counts that whole pipeline as slow, and
  theirs only the worker: our ideal is longer, and the slowdown smaller. As workers, what waits inside of a pipeline
  does not count as work, and the slowdown is larger.
- A long stage (ST) is in all pipelines alike, so pipelines do not wait for each other. As workers, sharing it out would
  gain all of the difference. In their replay it gains less: a pipeline's first and last micro-batches pass through all
  stages one after the other, whatever is shared out.
- Sequences of unequal length (SE) make pipelines wait for each other, and stages inside of each. Pipelines show the
  first part only; theirs is both.
"""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Trace:
    """The steps of a job, in seconds."""

    elapsed_s: Floats
    """(steps,)"""
    pipelines_s: Floats
    """When each pipeline was done, from the begin of the step; (steps, pipelines)."""
    workers_s: Floats
    """Computing of each worker; (steps, pipelines, stages)."""

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read a timeline: its events name the pipeline (pid), and its threads the stage."""
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)
        stages = {
            (event["pid"], event["tid"]): int(event["args"]["name"].split(",")[0].removeprefix("PP rank "))
            for event in events
            if event["name"] == "thread_name"
        }
        begin: dict[int, float] = defaultdict(lambda: float("inf"))
        end: dict[int, float] = defaultdict(float)
        done: dict[tuple[int, int], float] = defaultdict(float)
        computing: dict[tuple[int, int, int], float] = defaultdict(float)
        for event in events:
            if event["ph"] != "X":
                continue
            step, pipeline, until = event["args"]["step"], event["pid"], event["ts"] + event["dur"]
            begin[step], end[step] = min(begin[step], event["ts"]), max(end[step], until)
            if event["name"] in COMPUTING:
                done[step, pipeline] = max(done[step, pipeline], until)
                computing[step, pipeline, stages[pipeline, event["tid"]]] += event["dur"]
        steps, pipelines = sorted(begin), sorted({pipeline for _, pipeline in done})
        numbers = sorted(set(stages.values()))
        return cls(
            np.array([end[step] - begin[step] for step in steps]) / 1e6,
            np.array([[done[step, d] - begin[step] for d in pipelines] for step in steps]) / 1e6,
            np.array([[[computing[step, d, s] for s in numbers] for d in pipelines] for step in steps]) / 1e6,
        )


def run_of(ranks_s: Floats, elapsed_s: Floats) -> Run:
    """Return a run whose ranks do the same work in these seconds, (steps, ranks), and wait for the rest of the step."""
    steps, ranks = ranks_s.shape
    work = {"plan": 1, "samples": 1, "micro_batches": 1, "compute_s": ranks_s, "wait_s": elapsed_s[:, None] - ranks_s}
    # No step pays for a start.
    return Run.of("bsp", ranks, ranks, round=np.arange(steps), elapsed_s=elapsed_s, **work, first_round=-1)


def row(trace: str, ranks: str, ranks_s: Floats, found: Figures, names: list[str], theirs: dict[str, Any]) -> str:
    """Return a line of the table."""
    ours = (found.ideal + found.waiting_for_ranks) / found.ideal
    by_mean = ranks_s.max(axis=1).sum() / ranks_s.mean(axis=1).sum()
    worst = int(np.argmax(found.ranks.cost))
    share = found.ranks.cost[worst] / max(found.waiting_for_ranks, 1e-12)
    return (
        f"| {trace} | {ranks} | {ours:.2f} | {by_mean:.2f} | {theirs['blocking_slowdown']:.2f} | "
        f"{names[worst]}, {share:.0%} of the waiting |"
    )


def their_worst(theirs: dict[str, Any], mw: dict[str, Any], ms: dict[str, Any]) -> str:
    """Return what their authors hold responsible."""
    told = []
    for name, by in (("pipeline", "dp_rank"), ("stage", "stage")):
        parts = theirs[f"blocking_decompose_by_{by}"]
        worst = max(parts, key=parts.__getitem__)
        told.append(f"{name} {worst} alone {parts[worst]:.2f}")
    return f"S = {theirs['blocking_slowdown']:.2f}; {', '.join(told)}; M_W {mw['Mw']:.0%}, M_S {ms['Ms']:.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="their folder data")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    needed = [f"{kind}-{trace}.{end}" for trace in TRACES for kind, end in
              (("timeline", "json.gz"), ("result", "json"), ("mw", "json"), ("ms", "json"))]  # fmt: skip
    if missing := [name for name in needed if not (options.folder / name).is_file()]:
        parser.error(f"{options.folder} has no {missing[0]}; clone the repository, and name its folder data")
    rows, notes = [], []
    for name in TRACES:
        trace = Trace.read(options.folder / f"timeline-{name}.json.gz")
        theirs, mw, ms = (
            json.loads((options.folder / f"{kind}-{name}.json").read_text()) for kind in ("result", "mw", "ms")
        )
        steps, pipelines, stages = trace.workers_s.shape
        worker_s = trace.workers_s.reshape(steps, -1)
        views = {
            "pipelines": (trace.pipelines_s, [f"pipeline {d}" for d in range(pipelines)]),
            "workers": (worker_s, [f"pipeline {d}, stage {s}" for d in range(pipelines) for s in range(stages)]),
        }
        for view, (seconds, names) in views.items():
            found = figures(run_of(seconds, trace.elapsed_s), replayed=False)
            rows.append(row(name, f"{seconds.shape[1]} {view}", seconds, found, names, theirs))
        notes.append(f"- {name}, {steps} steps, theirs: {their_worst(theirs, mw, ms)}.")
    text = "\n".join(
        [
            "Slowdowns of ByteDance's three traces: a report's, and their authors' (StragglerAnalysis, 2025).",
            "",
            "| trace | ranks | ours | ours, mean as ideal | their S | ours: the worst |",
            "|---|---|---:|---:|---:|---|",
            *rows,
            "",
            *notes,
            "",
            WHY,
        ]
    )
    print(text)
    if options.write:
        write_result("straggler_analysis", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
