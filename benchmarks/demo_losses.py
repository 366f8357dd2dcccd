"""Check that rounding does not decide the demo's loss: twenty seeds, each also with weights changed by a millionth.

    python benchmarks/demo_losses.py [--write] [--seeds 20] [--rounds 120] [--jobs 2]

Each job trains the demo's network, data and hyper-parameters in one process. A seed draws the first weights and the
order of the samples. The loss is that on the demo's held-out pictures. Two schemes of the same demo sum the same
gradients in another order, which changes them by about a ten-millionth; at the edge of stability a training then ends
elsewhere. This takes half an hour on one core.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PERTURBATION = 1e-6


def train(seed: int, rounds: int, perturbation: float, factor: float = 1.0) -> float:
    """Run the demo's training in this process, and return the final loss on the held-out pictures.

    ``factor`` multiplies the learning rate.
    """
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import demo_data
    import demo_rank
    import torch
    from torch.nn import functional

    from hvd_hetero.data.permutation import SharedPermutation

    torch.set_num_threads(1)
    model = demo_rank.network(seed)
    perturb(model, perturbation, seed)
    optimizer = demo_rank.sgd(model)
    for group in optimizer.param_groups:
        group["lr"] *= factor
    x, y = demo_rank.images(demo_data.TRAIN_SAMPLES, seed=2)
    order = SharedPermutation(len(x), shuffle=True, seed=seed)
    for _, indices in zip(range(rounds), batches(order, demo_data.GLOBAL_BATCH), strict=False):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[indices]), y[indices]).backward()
        optimizer.step()
    x, y = demo_rank.images(demo_data.TEST_SAMPLES, seed=3)
    with torch.no_grad():
        return float(functional.cross_entropy(model(x), y))


def perturb(model, size: float, seed: int) -> None:
    """Change every weight by a relative amount of the order of ``size``."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator))


def batches(order, size: int) -> Iterator[np.ndarray]:
    """Yield rounds of the shared order, without end."""
    from hvd_hetero.rounds import RoundPlan

    while True:
        if order.remaining == 0:
            order.start(order.epoch + 1)
        yield order.take(RoundPlan.of([size]), 0).part
        order.finish([size])


def table(plain: dict[int, float], changed: dict[int, float], learnt: float) -> tuple[list[str], list[str]]:
    """Return the rows, and what misses its target."""
    rows = ["| seed | loss | from weights changed by 1e-6 | difference |", "|---:|---:|---:|---:|"]
    rows += [
        f"| {seed} | {plain[seed]:.4f} | {changed[seed]:.4f} | {changed[seed] - plain[seed]:+.1e} |" for seed in plain
    ]
    everything = [*plain.values(), *changed.values()]
    most = max(abs(changed[seed] - plain[seed]) for seed in plain)
    rows += [
        "",
        f"Losses from {min(everything):.4f} to {max(everything):.4f}; rounding changes one by {most:.1e} at most.",
    ]
    amiss = []
    if not max(everything) <= learnt or any(map(math.isnan, everything)):
        amiss.append(f"a loss above {learnt:g}")
    if not most <= max(plain.values()) - min(plain.values()):
        amiss.append("rounding changes a loss by more than the seeds do")
    return rows, amiss


def main() -> int:
    sys.path.insert(0, str(EXAMPLES))
    from _report import write_result
    from demo_data import LEARNT, ROUNDS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="2 or more (default 20)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each training (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default 1)")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    if options.seeds < 2 or options.rounds < 1 or options.jobs < 1:
        parser.error("--seeds must be at least 2, --rounds and --jobs at least 1")
    found: dict[float, dict[int, float]] = {0.0: {}, PERTURBATION: {}}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        waiting = {
            pool.submit(train, seed, options.rounds, size): (size, seed)
            for size in found
            for seed in range(options.seeds)
        }
        for done in as_completed(waiting):
            size, seed = waiting[done]
            found[size][seed] = done.result()
            print(f"seed {seed}, changed by {size:g}: {found[size][seed]:.4f}", flush=True)
    plain, changed = ({seed: of[seed] for seed in sorted(of)} for of in found.values())
    rows, amiss = table(plain, changed, LEARNT)
    head = f"Loss of the demo's network on held-out pictures after {options.rounds} rounds; chance is 2.30."
    text = "\n".join([head, "", *rows, "", f"Amiss: {'; '.join(amiss) or 'nothing'}."])
    print(text)
    if options.write:
        write_result("demo_losses", text)
    return 1 if amiss else 0


if __name__ == "__main__":
    raise SystemExit(main())
