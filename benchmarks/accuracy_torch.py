"""Every scheme trains the same small model to the same accuracy, on real ranks of unequal speed.

    python benchmarks/accuracy_torch.py [--write] [--ranks 3] [--seeds 3]

A network of one hidden layer on scikit-learn's digits, twelve epochs, the same hyper-parameters throughout; accuracy
on the quarter held back, of the mean of all ranks' models. A scheme is as good as BSP if the difference of the means
over the seeds is within the spread over the seeds (the larger of both schemes', from worst to best).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from rich.progress import Progress

RANK = Path(__file__).with_name("_accuracy_rank.py")


def compare(outcome: dict[str, list[dict]]) -> tuple[list[str], list[str]]:
    """The table, and what is amiss."""
    accuracies = {name: [run["accuracy"] for run in runs] for name, runs in outcome.items()}
    spread = {name: max(of) - min(of) for name, of in accuracies.items()}
    mean = {name: statistics.mean(of) for name, of in accuracies.items()}
    rows = [
        "| scheme | accuracy (mean) | of the seeds | minus BSP's | spread | rounds | each sample once an epoch |",
        "|---|---:|---|---:|---:|---:|---|",
    ]
    amiss = []
    for name, runs in outcome.items():
        difference = mean[name] - mean["bsp"]
        allowed = max(spread[name], spread["bsp"])
        once = all(run["once"] for run in runs)
        if abs(difference) > allowed:
            amiss.append(f"{name} differs from BSP by {difference:+.4f}, spread {allowed:.4f}")
        if not once:
            amiss.append(f"{name} did not visit each sample once")
        seeds = ", ".join(f"{a:.4f}" for a in accuracies[name])
        rounds = round(statistics.mean(run["rounds"] for run in runs))
        rows.append(
            f"| {name} | {mean[name]:.4f} | {seeds} | {difference:+.4f} | {allowed:.4f} | {rounds} | "
            f"{'yes' if once else '**no**'} |"
        )
    return rows, amiss


def main() -> int:
    from _report import write_result

    from hvd_hetero.testing import launch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    with Progress() as progress:
        task = progress.add_task("training", total=13 * options.seeds)
        result = launch(
            RANK, options.ranks, [options.seeds], timeout_s=900, on_line=lambda rank, line: progress.advance(task)
        )
    rows, amiss = compare(result.reports[0])
    head = f"Accuracy on held-back digits, {options.ranks} unequal ranks, {options.seeds} seeds."
    text = "\n".join([head, "", *rows, "", f"Amiss: {'; '.join(amiss) or 'nothing'}."])
    print(text)
    if options.write:
        write_result("accuracy_torch", text)
    return 1 if amiss else 0


if __name__ == "__main__":
    raise SystemExit(main())
