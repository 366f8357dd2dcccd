"""Every scheme trains the same small model to the same accuracy, on real ranks of unequal speed.

    python benchmarks/accuracy_torch.py [--write] [--ranks 3] [--seeds 5]

A network of one hidden layer trains on scikit-learn's digits for twelve epochs, with the same hyper-parameters
throughout. The accuracy is that of the mean of all ranks' models on the quarter held back. A scheme is as good as BSP
if the means over the seeds differ by no more than BSP's spread, from its worst seed to its best, in either direction. A
scheme's own spread is shown and allows it nothing; otherwise a less steady scheme would have a wider margin.

Five seeds are used because three often differ little by chance. For accuracies that scatter normally by s, the spread
of n seeds is 1.7 s on average for three and 2.3 s for five, and the difference of two means 0.8 s and 0.6 s. A scheme
as good as BSP then misses with a probability of about 0.14 and 0.02.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from rich.progress import Progress

ROUNDING = 1e-9  # accuracies are counts over the size of the test set, so that differences are often just the spread
RANK = Path(__file__).with_name("_accuracy_rank.py")


def compare(outcome: dict[str, list[dict]]) -> tuple[list[str], list[str]]:
    """Return the table, and what misses its target."""
    accuracies = {name: [run["accuracy"] for run in runs] for name, runs in outcome.items()}
    spread = {name: max(of) - min(of) for name, of in accuracies.items()}
    mean = {name: statistics.mean(of) for name, of in accuracies.items()}
    rows = [
        "| scheme | accuracy (mean) | of the seeds | minus BSP's | own spread | rounds | each sample once an epoch |",
        "|---|---:|---|---:|---:|---:|---|",
    ]
    amiss = []
    allowed = spread["bsp"]
    for name, runs in outcome.items():
        difference = mean[name] - mean["bsp"]
        once = all(run["once"] for run in runs)
        if abs(difference) > allowed + ROUNDING:
            amiss.append(f"{name} differs from BSP by {difference:+.4f}, more than BSP's spread of {allowed:.4f}")
        if not once:
            amiss.append(f"{name} did not visit each sample once")
        seeds = ", ".join(f"{a:.4f}" for a in accuracies[name])
        rounds = round(statistics.mean(run["rounds"] for run in runs))
        rows.append(
            f"| {name} | {mean[name]:.4f} | {seeds} | {difference:+.4f} | {spread[name]:.4f} | {rounds} | "
            f"{'yes' if once else '**no**'} |"
        )
    rows += ["", f"Target: a difference of at most BSP's own spread, {allowed:.4f}, and each sample once an epoch."]
    return rows, amiss


def main() -> int:
    from _report import write_result

    from hvd_hetero.testing import launch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=5, help="2 or more (default 5)")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds must be at least 2: one seed has no spread")
    with Progress() as progress:
        task = progress.add_task("training", total=13 * options.seeds)
        result = launch(
            RANK, options.ranks, [options.seeds], timeout_s=1800, on_line=lambda rank, line: progress.advance(task)
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
