"""Is the simulator right? Real ranks under CPU quotas, their telemetry fed back, rates side by side.

    python benchmarks/papers/validation.py [--write] [--rounds N] [--blocks N] [--keep DIR]

Two ranks, one of them at half a core, and three ranks on two cores at 0.6, 0.6 and 0.3, train the demo's network
under BSP and LB-BSP in alternating blocks. The machines of each recorded run are rebuilt from its telemetry alone
(``hvd_hetero.simulation.replay``), and both schemes simulated on them. A scheme on its own run shows that the model
of a round is right; a scheme on the other's run is what ``hvd-hetero simulate --from`` promises: it has seen other
batch sizes and other moments than it predicts. Target: every median within 5 % of the measured samples per second.

Needs a quiet machine with two cores and writable control groups; takes about five minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import _tables
from rich.progress import Progress

from hvd_hetero.policies import resolve_policy
from hvd_hetero.simulation import simulate
from hvd_hetero.simulation.replay import WARM_UP_ROUNDS, replay
from hvd_hetero.telemetry import Run, read_run
from hvd_hetero.testing import KEEP_MEMORY, launch, quota_available

POLICIES = ("bsp", "lb-bsp")
JOBS = {2: (1.0, 0.5), 3: (0.6, 0.6, 0.3)}
WITHIN, FINDING = 0.05, 5  # rounds in which LB-BSP finds its split, left out on both sides


def record(ranks: int, options: argparse.Namespace, folder: Path, progress: Progress) -> None:
    task = progress.add_task(f"{ranks} ranks", total=options.blocks * len(POLICIES))

    def on_line(rank: int, line: str) -> None:
        if rank == 0 and line.startswith("{") and "block" in json.loads(line):
            progress.advance(task)

    arguments = ["--policies", *POLICIES, "--blocks", options.blocks, "--rounds", options.rounds, "--out", folder]
    arguments += ["--global-batch", options.global_batch, "--shares", *JOBS[ranks], *(["--pin"] if ranks == 2 else [])]
    worker = Path(__file__).with_name("_validation_rank.py")
    env = KEEP_MEMORY | ({"HOROVOD_CYCLE_TIME": f"{options.cycle_ms:g}"} if options.cycle_ms else {})
    launch(worker, ranks, arguments, timeout_s=options.timeout, env=env, on_line=on_line)


def measured(run: Run) -> float:
    return run.after(WARM_UP_ROUNDS + FINDING).throughput


def simulated(run: Run, policy: str) -> float:
    machines = replay(run)
    return simulate(machines.cluster, resolve_policy(policy), run.global_batch, machines.rounds).rate(FINDING)


def main() -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=80, help="rounds of each block (default 80)")
        parser.add_argument("--blocks", type=int, default=3, help="blocks of each policy (default 3)")
        parser.add_argument("--global-batch", type=int, default=128)
        parser.add_argument("--timeout", type=float, default=400.0, help="seconds for each job (default 400)")
        parser.add_argument("--keep", type=Path, help="folder to keep the telemetry in")
        parser.add_argument("--ranks", type=int, choices=JOBS, nargs="+", default=[*JOBS])
        parser.add_argument("--cycle-ms", type=float, help="Horovod's cycle, in which idle ranks ask for news")

    options = _tables.options(__doc__ or "", extend)
    if not quota_available():
        print(f"this machine cannot be used: {quota_available().why}", file=sys.stderr)
        return 1
    verdicts, rows = _tables.Verdicts(), []
    with tempfile.TemporaryDirectory() as temporary:
        for ranks in options.ranks:
            shares = JOBS[ranks]
            folder = (options.keep or Path(temporary)) / f"{ranks}-ranks"
            folder.mkdir(parents=True, exist_ok=True)
            with Progress(transient=True) as progress:
                record(ranks, options, folder, progress)
            runs = {p: [read_run(folder / f"{p}.{block}.jsonl") for block in range(options.blocks)] for p in POLICIES}
            for policy in POLICIES:
                real = statistics.median(measured(run) for run in runs[policy])
                for source in POLICIES:
                    told = statistics.median(simulated(run, policy) for run in runs[source])
                    kind = "itself" if source == policy else "the other"
                    job = f"{ranks} ranks at {', '.join(map(str, shares))}"
                    rows.append([job, policy, source, f"{real:.1f}", f"{told:.1f}", f"{told / real - 1:+.1%}"])
                    verdicts.check(f"{ranks} ranks, {policy} from {kind}: off by", abs(told / real - 1), most=WITHIN)
    lines = _tables.table(["job", "scheme", "telemetry of", "measured, samples/s", "simulated", "off"], rows)
    lines += [
        "",
        f"Medians of {options.blocks} alternating blocks of {options.rounds} rounds of {options.global_batch} samples.",
    ]
    return _tables.finish("validation", lines, verdicts, options.write)


if __name__ == "__main__":
    sys.exit(main())
