"""What LB-BSP costs where it has nothing to gain: the step time on equal ranks, over that of stock Horovod.

    python benchmarks/overhead_torch.py [--write]

Two ranks, pinned to a core each, train the same network twice over: with stock Horovod (``hvd.DistributedOptimizer``,
the ``DistributedSampler`` and ``DataLoader`` of PyTorch) and with LB-BSP (``BalancedLoader``,
``DistributedOptimizer``), in alternating blocks of rounds of one run. Each pair of neighbouring blocks gives one
ratio of median step times; the table has the median of these ratios and their quartiles. There are two trainings of
each kind, made in the order stock, LB-BSP, LB-BSP, stock: two networks of one process differ by a hundredth in pace,
by where their memory came to lie. No absolute time is a result.

The networks: the demo's convolutional one, and dense ones of 10, 100 and 400 parameter tensors.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.progress import Progress
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 64  # per rank
BLOCK = 20
# As in the demo: without it, page faults of the C library's allocator drown what is to be measured (docs/cpu.md).
KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TOP_PAD_": "67108864",
}
NETWORKS = ("convolutional", "10 tensors", "100 tensors", "400 tensors")


def dense(tensors: int) -> tuple[torch.nn.Module, TensorDataset]:
    """Layers of a weight and a bias each; narrower the more there are, so that a step stays within a blink."""
    width = {10: 1024, 100: 256, 400: 128}[tensors]
    layers = [m for _ in range(tensors // 2) for m in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64 * 2 * BATCH, width, generator=generator)
    return torch.nn.Sequential(*layers), TensorDataset(x, torch.randint(10, (len(x),), generator=generator))


def convolutional() -> tuple[torch.nn.Module, TensorDataset]:
    import demo_rank

    return demo_rank.network(), TensorDataset(*demo_rank.images(32 * 2 * BATCH, seed=2))


def make(name: str) -> tuple[torch.nn.Module, TensorDataset]:
    torch.manual_seed(0)
    name = name.split(".")[0]
    return convolutional() if name == "convolutional" else dense(int(name.split()[0]))


def endless(loader: object, set_epoch: Callable[[int], None]) -> Iterator:
    for epoch in itertools.count():
        set_epoch(epoch)
        yield from loader


def steps(batches: Iterator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[float]:
    """Train on; each step yields its seconds, fetching of the batch included."""
    while True:
        began = time.perf_counter()
        x, y = next(batches)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield time.perf_counter() - began


def rank_main(pairs: int) -> None:
    import horovod.torch as hvd

    from hvd_hetero.testing import pin_to_core, report
    from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def stock(name: str) -> Iterator[float]:
        model, data = make(name)
        sampler = DistributedSampler(data, hvd.size(), hvd.rank(), shuffle=True, seed=0)
        names = [(f"stock.{name}.{n}", p) for n, p in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(sgd(model), names)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return steps(endless(DataLoader(data, BATCH, sampler=sampler), sampler.set_epoch), model, optimizer)

    def balanced(name: str) -> Iterator[float]:
        model, data = make(name)
        balance = LoadBalance("lb-bsp", global_batch=BATCH * hvd.size())
        loader = BalancedLoader(data, balance, shuffle=True, seed=0)
        names = [(f"{name}.{n}", p) for n, p in model.named_parameters()]
        optimizer = DistributedOptimizer(sgd(model), balance, names)
        return steps(endless(loader, loader.set_epoch), model, optimizer)

    hvd.init()
    torch.set_num_threads(1)
    pin_to_core(hvd.rank())
    medians: dict[str, list[tuple[float, float]]] = {name: [] for name in NETWORKS}
    for name in NETWORKS:
        stocks, ours = [stock(f"{name}.0")], [balanced(name), balanced(name)]
        stocks.append(stock(f"{name}.1"))
        for run in (*stocks, *ours):
            for _ in range(BLOCK):
                next(run)
        for pair in range(pairs):
            runs = stocks[pair % 2], ours[pair % 2]
            # The order within a pair alternates too, so that a drift of the machine favours neither.
            order = (0, 1) if pair % 4 < 2 else (1, 0)
            found = {which: statistics.median(next(runs[which]) for _ in range(BLOCK)) for which in order}
            medians[name].append((found[0], found[1]))
            if hvd.rank() == 0:
                print(name, flush=True)
    report(medians)


def main() -> int:
    from _report import write_result

    from hvd_hetero.testing import launch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=16, help="pairs of blocks per network (default 16)")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    with Progress() as progress:
        tasks = {name: progress.add_task(f"{name:<15}", total=options.pairs) for name in NETWORKS}
        examples = str(Path(__file__).resolve().parents[1] / "examples")
        result = launch(
            __file__, 2, [options.pairs], timeout_s=900, env=KEEP_MEMORY | {"PYTHONPATH": examples},
            on_line=lambda rank, line: progress.advance(tasks[line]) if line in tasks else None,
        )  # fmt: skip
    rows = [
        "Step time of LB-BSP over stock Horovod, two equal ranks, alternating blocks of one run.",
        "",
        "| network | ratio (median) | quartiles | ratio on rank 1 |",
        "|---|---:|---:|---:|",
    ]
    worst = 0.0
    for name in NETWORKS:
        ratios, others = ([b / a for a, b in rank[name]] for rank in result.reports)
        low, middle, high = statistics.quantiles(ratios, n=4)
        worst = max(worst, middle)
        rows.append(f"| {name} | {middle:.3f} | {low:.3f} to {high:.3f} | {statistics.median(others):.3f} |")
    text = "\n".join([*rows, "", f"Target: at most 1.02 in each row; the largest is {worst:.3f}."])
    print(text)
    if options.write:
        write_result("overhead_torch", text)
    return 0 if worst <= 1.02 else 1


if __name__ == "__main__":
    import sys

    if "HOROVOD_RANK" in os.environ:
        rank_main(int(sys.argv[1]))
    else:
        raise SystemExit(main())
