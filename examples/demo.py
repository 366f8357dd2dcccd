"""See load balancing make a real Horovod job faster: two ranks on this machine, one of them slowed down.

    make demo                    one rank at half speed
    make demo SLOW=3             at a third
    make demo FRAMEWORK=keras    with Keras instead of PyTorch

It trains a small convolutional network under BSP, under LB-BSP, and with stock Horovod whose split is set by hand (the
oracle), and ends with a table and a picture. The three trainings take about a minute of rounds together, at least 30
each. They see the same samples in the same order; the exit code is 1 if they do not end at the same loss.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from demo_data import GLOBAL_BATCH, LEAST_ROUNDS, ROUNDS, WARM_UP_ROUNDS, judge
from demo_picture import rounds_figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hvd_hetero.telemetry import Run, read_run
from hvd_hetero.testing import KEEP_MEMORY, LaunchError, launch

RANKS = 2
WORKERS = {"torch": "demo_rank.py", "keras": "demo_rank_keras.py"}
BALANCED = ("bsp", "lb-bsp")
PHASES = {"bsp": "BSP", "lb-bsp": "LB-BSP", "oracle": "oracle"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=float, default=2.0, help="how many times slower the last rank is (default 2)")
    parser.add_argument(
        "--rounds", type=int, help=f"rounds of each training (default {LEAST_ROUNDS} to {ROUNDS}, by time)"
    )
    parser.add_argument(
        "--global-batch", type=int, default=GLOBAL_BATCH, help="samples per round (default %(default)s)"
    )
    parser.add_argument("--framework", choices=WORKERS, default="torch", help="torch (default) or keras")
    parser.add_argument("--out", type=Path, help="where telemetry and picture go (default out/demo, out/demo-keras)")
    options = parser.parse_args()
    if options.slow < 1 or (options.rounds or ROUNDS) < 4 * WARM_UP_ROUNDS or options.global_batch < 2 * RANKS:
        parser.error("--slow must be at least 1, --rounds at least 20, --global-batch at least 4")
    options.out = options.out or Path("out", "demo" if options.framework == "torch" else "demo-keras")
    options.out.mkdir(parents=True, exist_ok=True)
    for phase in BALANCED:
        (options.out / f"{phase}.jsonl").unlink(missing_ok=True)  # an earlier demo's file would be kept otherwise
    console = Console()
    console.print(
        f"Two ranks by horovodrun, the last one [b]{options.slow:g} times slower[/b]; "
        f"rounds of {options.global_batch} samples under three policies."
    )
    try:
        results, batches, slowness = run(options, console)
    except LaunchError as error:
        console.print(f"[red]The job failed.[/red] {error}", highlight=False)
        return 1
    runs = {phase: read_run(options.out / f"{phase}.jsonl").after(WARM_UP_ROUNDS) for phase in BALANCED}
    console.print(table(results, batches, runs))
    ratio = results["lb-bsp"]["samples_per_s"] / results["bsp"]["samples_per_s"]
    close = results["lb-bsp"]["samples_per_s"] / results["oracle"]["samples_per_s"]
    balanced = runs["lb-bsp"]
    busy_s = balanced.compute_s + balanced.input_s
    without_waiting = (balanced.samples.sum(0) / busy_s.sum(0)).sum() / results["bsp"]["samples_per_s"]
    console.print(
        f"LB-BSP is [b]{ratio:.2f} times[/b] as fast as BSP, [b]{close:.3f}[/b] of the oracle. If no rank waited, "
        f"not even for the transfer, it would be {without_waiting:.2f} times as fast."
    )
    same, verdict = judge(
        {name: results[p]["loss"] for p, name in PHASES.items()},
        len(runs["bsp"].round) + WARM_UP_ROUNDS,
        options.global_batch,
    )
    console.print(verdict if same else f"[red]{verdict}[/red]", highlight=False)
    console.print("The oracle is stock Horovod, its split set by hand to the speeds that the ranks showed under BSP.")
    console.print(f"Slowed by: {slowness[-1]}. Figures without the first {WARM_UP_ROUNDS} rounds of each training.")
    picture = options.out / "rounds.png"
    whole = {PHASES[phase]: read_run(options.out / f"{phase}.jsonl") for phase in runs}
    title = f"Two ranks, rank 1 slowed {options.slow:g} times"
    rounds_figure(whole, title, warm_up=WARM_UP_ROUNDS).savefig(picture, dpi=110)
    console.print(f"Picture: {picture}    telemetry: {options.out}/*.jsonl")
    summary = {
        "slow": options.slow,
        "ratio_to_bsp": ratio,
        "ratio_to_oracle": close,
        "same_loss": same,
        "phases": results,
    }
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return 0 if same else 1


def run(options: argparse.Namespace, console: Console) -> tuple[dict[str, dict], dict[str, list[int]], list[str]]:
    """Launch the ranks and draw their progress; return results and last batches of each phase, and the slow-downs."""
    results: dict[str, dict] = {}
    batches: dict[str, list[int]] = {}
    slowness: list[str] = []
    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[batch]}"))  # fmt: skip
    with Progress(*columns, console=console) as progress:
        start = progress.add_task("starting the ranks", total=None, batch="")
        tasks = {
            p: progress.add_task(t, total=options.rounds or ROUNDS, start=False, batch="") for p, t in PHASES.items()
        }

        def on_line(rank: int, line: str) -> None:
            if rank != 0 or not line.startswith("{"):
                return
            event = json.loads(line)
            if "slowness" in event:
                slowness.extend(event["slowness"])
                progress.update(start, visible=False)
            elif "rounds" in event:
                for task in tasks.values():
                    progress.update(task, total=event["rounds"])
            elif "round" in event:
                phase = event["phase"]
                progress.start_task(tasks[phase])
                batches[phase] = event["batch"]
                progress.update(tasks[phase], completed=event["round"], batch=f"batches {event['batch']}")
            else:
                results[event["phase"]] = event

        of_ranks = {k: v for k, v in vars(options).items() if k != "framework" and v is not None}
        arguments = [f"--{k.replace('_', '-')}={v}" for k, v in of_ranks.items()]
        worker = Path(__file__).parent / WORKERS[options.framework]
        launch(worker, RANKS, arguments, timeout_s=1800, env=KEEP_MEMORY, on_line=on_line)
    return results, batches, slowness


def table(results: dict[str, dict], batches: dict[str, list[int]], runs: dict[str, Run]) -> Table:
    base = results["bsp"]["samples_per_s"]
    drawn = Table(title="What it did", title_justify="left")
    drawn.add_column("")
    for heading in ("samples/s", "times BSP", "waiting share", "batch sizes", "final loss"):
        drawn.add_column(heading, justify="right")
    for phase, name in PHASES.items():
        waiting = " ".join(f"{share:.0%}" for share in runs[phase].waiting_share) if phase in runs else "—"
        drawn.add_row(
            name,
            f"{results[phase]['samples_per_s']:.0f}",
            f"{results[phase]['samples_per_s'] / base:.2f}",
            waiting,
            " + ".join(map(str, batches[phase])),
            f"{results[phase]['loss']:.3f}",
        )
    return drawn


if __name__ == "__main__":
    raise SystemExit(main())
