r"""Time to a loss with a batch that adapts, on real ranks, against fixed batches with the best learning rate of each.

    python benchmarks/goodput_ranks.py [--write] [--seeds 5]

A small network learns scikit-learn's digits, each shifted by up to one pixel in both directions (12,123 samples), until
its loss on all of them is at most 0.2 in the mean of five looks, one after every 1,024 samples, or after every step of
more. A layer sleeps 3 ms for each micro-batch and 0.1 ms for each sample on the fastest rank, so that ranks are as slow
as planned whatever else runs. Time is that of training alone: parameters are kept, and looked at afterwards. Accuracies
are of a quarter held back, after half as many steps again.

**Fixed batches** train by LB-BSP (and one by BSP: equal batches), each with the learning rate that takes it to the
target in the fewest steps, found beforehand in one process among powers of two, over three seeds. So they have what no
user's guess has. ``Goodput`` starts at one of these batches with its rate, and goes on by AdaScale.

**The batch chosen**: at ten points on the way to the target, φ is computed from the gradients of all samples at the
present parameters, T(B) is the median of rounds of each size, and the goodput r(B) / T(B) of the batch chosen is shown
over that of the best size.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import Progress
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hvd_hetero.policies.goodput import gain, sizes
from hvd_hetero.testing import launch

RANK = Path(__file__).with_name("_goodput_rank.py")
CLUSTERS = ([1.0, 1 / 2], [1.0, 1 / 2, 1 / 3])
FIXED, START, MOST = (32, 256, 2048), 128, 2048
SIZES = sizes(FIXED[0], START, MOST)
TARGET, AT_LEAST = 0.2, 0.95
RATES = [0.1 * 2.0**k for k in range(-1, 5)]
LOOK, MEAN_OF, LONGEST = 1024, 5, 4000  # samples, looks, steps


class Scheme(NamedTuple):
    """How a training is divided. No batch: it adapts."""

    name: str
    batch: int | None
    equal: bool = False


def schemes() -> list[Scheme]:
    """Return what is compared."""
    return [
        Scheme("adapts", None),
        *(Scheme(f"LB-BSP, {batch}", batch) for batch in FIXED),
        Scheme(f"equal batches, {START}", START, equal=True),
    ]


class Digits(NamedTuple):
    """The samples, and those held back."""

    x: torch.Tensor
    y: torch.Tensor
    x_held: torch.Tensor
    y_held: torch.Tensor


def _digits() -> Digits:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16.0, labels, test_size=0.25, random_state=0, stratify=labels)
    x, x_held, y, y_held = (torch.as_tensor(part) for part in parts)
    images, shifts = x.float().view(-1, 8, 8), [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    shifted = torch.cat([images.roll(shift, (1, 2)).flatten(1) for shift in shifts])
    return Digits(shifted, y.repeat(len(shifts)), x_held.float(), y_held)


DATA = _digits()


def network() -> torch.nn.Module:
    """Return the network."""
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))


@torch.no_grad()
def loss_of(model: torch.nn.Module) -> float:
    """Return the loss on all samples."""
    return float(functional.cross_entropy(model(DATA.x), DATA.y))


def reached(losses: Sequence[float]) -> bool:
    """Return whether the target is reached, by the losses at all looks so far."""
    return len(losses) >= MEAN_OF and statistics.mean(losses[-MEAN_OF:]) <= TARGET


def steps_to_target(batch: int, rate: float, seed: int, most: float) -> float:
    """Return the steps of one process until the target is reached; infinite if there are more than ``most``."""
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    losses: list[float] = []
    step = 0
    while True:
        for index in torch.randperm(len(DATA.x)).split(batch)[:-1]:
            optimizer.zero_grad()
            functional.cross_entropy(model(DATA.x[index]), DATA.y[index]).backward()
            optimizer.step()
            step += 1
            if step % max(LOOK // batch, 1) == 0:
                losses.append(loss_of(model))
                if reached(losses):
                    return step
            if step >= most:
                return math.inf


def tuned(batch: int) -> tuple[float, float]:
    """Return the learning rate that takes the fewest steps, and these."""
    best = 0.0, float(LONGEST)
    for rate in RATES:
        # A rate that needs twice as many steps as another one is not followed further.
        steps = statistics.mean(steps_to_target(batch, rate, seed, 2 * best[1]) for seed in (100, 101, 102))
        if steps < best[1]:
            best = rate, steps
    if not best[0]:
        raise SystemExit(f"no learning rate takes a batch of {batch} to the target in {LONGEST} steps")
    return best


def ratio(times: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return the mean ratio over the seeds, and its standard error."""
    ratios = [other / time for time, other in zip(times, others, strict=True)]
    return statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(len(ratios))


def of_cluster(found: dict, shown: str) -> tuple[list[str], list[float]]:
    """Return the rows of one cluster, and the goodputs of the batches chosen, over those of the best."""
    runs = {scheme.name: [run for run in found["runs"] if run["scheme"] == scheme.name] for scheme in schemes()}
    seconds = {name: [run["seconds"] or math.nan for run in of] for name, of in runs.items()}
    rows = []
    for name, of in runs.items():
        over, error = ratio(seconds["adapts"], seconds[name])
        accuracies = [run["accuracy"] for run in of]
        missed = sum(run["seconds"] is None for run in of)
        rows.append(
            f"| {shown} | {name} | {statistics.median(run['rounds'] or math.nan for run in of):,.0f} | {over:.3f} "
            f"| {error:.3f} | {statistics.mean(accuracies):.4f} | {min(accuracies):.4f} to {max(accuracies):.4f} "
            f"| {missed} |"
        )
    return rows, [share for run in runs["adapts"] for share in of_best(run["chosen"], found["round_s"])]


def of_best(points: Sequence[tuple[int, float]], round_s: dict[str, float]) -> list[float]:
    """Return the goodput at each point, of the batch that was chosen, over that of the best size."""
    shares = []
    for batch, scale in points:
        goodput = {size: gain(size, START, scale) / round_s[str(size)] for size in SIZES}
        shares.append(goodput[batch] / max(goodput.values()))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds must be at least 2: one seed has no error")
    torch.set_num_threads(1)
    batches = sorted({START, *FIXED})
    rows, notes, low = [], [], 0
    with Progress() as progress:
        task = progress.add_task("learning rates", total=len(batches))
        rates = {}
        for batch in batches:
            rates[batch] = tuned(batch)
            progress.advance(task)
        for speeds in CLUSTERS:
            shown = " : ".join(f"{speed:.2g}" for speed in speeds)
            task = progress.add_task(shown, total=len(schemes()) * options.seeds)
            result = launch(
                RANK, len(speeds), [json.dumps(speeds), options.seeds, json.dumps(rates)], timeout_s=3600,
                on_line=functools.partial(lambda task, rank, line: progress.advance(task), task),
            )  # fmt: skip
            found = result.reports[0]
            more, shares = of_cluster(found, shown)
            rows += more
            low += sum(share < AT_LEAST for share in shares)
            last = [run["chosen"][-1][0] for run in found["runs"] if run["chosen"]]
            notes.append(
                f"{shown}: goodput of the batch chosen over that of the best of {len(SIZES)} sizes: median "
                f"{statistics.median(shares):.3f}, least {min(shares):.3f}; {sum(s < AT_LEAST for s in shares)} of "
                f"{len(shares)} points are below {AT_LEAST}. The last batch: {', '.join(map(str, last))}."
            )
    text = "\n".join([
        "| speeds | scheme | rounds to the target | its time over that of the batch that adapts | error "
        "| accuracy at the end (mean) | of the seeds | did not get there |",
        "|---|---|---:|---:|---:|---:|---|---:|",
        *rows, "", *notes, "",
        "Learning rates found: " + ", ".join(f"{rate:g} for {batch}" for batch, (rate, _) in rates.items()) + ".",
    ])  # fmt: skip
    print(text)
    if options.write:
        from _report import write_result

        print(write_result("goodput_ranks", text))
    if low:
        raise SystemExit(f"the goodput of the batch chosen is below {AT_LEAST} of the best one's at {low} points")


if __name__ == "__main__":
    main()
