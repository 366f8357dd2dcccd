"""Overhead of balancing: the step time on equal ranks, over stock Horovod's.

    python benchmarks/overhead_torch.py [--write] [--only NAME ...] [--batch SAMPLES]
    python benchmarks/overhead_torch.py --short [--write]

Two ranks, each pinned to a core, train one network with stock Horovod (``hvd.DistributedOptimizer``, the
``DistributedSampler`` and ``DataLoader`` of PyTorch), with BSP and with LB-BSP of this project (``BalancedLoader``,
``DistributedOptimizer``), in alternating blocks of rounds of one run. Each block of ours and its neighbour of stock
give one ratio of median step times; the table has the median of these ratios and their quartiles. No absolute time is a
result. Blocks are short, because the pace of a machine with neighbours changes within a second: in the same time, many
ratios of steps close together give a surer median than few ratios of long blocks (stock Horovod against itself, 490
steps: an error of 0.007 in blocks of 2, of 0.015 and more in blocks of 8 and 16).

Each network trains in several launches, which differ by more than the pairs of one launch show (once 0.994, then 1.019,
with an error of 0.007 each). Their number depends on their scatter only, not on their results, by a rule set
beforehand: three, and one more while the standard error of a median is above half a per cent, up to nine. All pairs of
all launches count. With q the distance of the quartiles, the error of a median of n is about 0.93 q / sqrt(n) (exact
for the normal law and large n), or the standard deviation of the launches' medians implies more. If it stays above half
a per cent, a median closer than two errors to the target leaves it undecided. The median holds ratios of both ranks,
but a pair counts once in n: the ranks wait for each other, so their step times are nearly the same.

All kinds train the very same tensors: they share parameters, momenta and the inner optimizer, and the hooks are put on
for a block and taken off after it. (Two networks of one process differ by up to a tenth in pace, by where their memory
lies, which would hide the overhead.) The first steps of a block do not count.

The networks are the demo's convolutional one, and dense ones of 10, 100 and 400 parameter tensors. Balancing costs the
same for any batch, so the ratio depends on the batch. A step of a tenth or two of a second, usual for networks of so
many tensors, takes 256 samples here, and a quarter of it in the convolutional one; ``--batch`` chooses fewer.

``--short`` is for steps of some milliseconds, which show everything that is done once a step: a dense network of four
layers with few samples, in blocks of more steps. Its target is looser.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from _alternating import STOCK, STOCK_S, alternate
from _report import error_of_median, judged, write_result
from rich.progress import Progress
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

USUAL = 256  # samples per rank
BLOCK = 2
KINDS = ("bsp", "lb-bsp")
UNCOUNTED = 1  # first steps of a block: stock Horovod is wrapped again, and caches hold the others' data
TARGET = 1.01
ERROR = 0.005  # of a median, above which there is another launch: half of what the target leaves
LAUNCHES = 3
MOST_LAUNCHES = 9
NETWORKS = ("convolutional", "10 tensors", "100 tensors", "400 tensors")
SHORT = {"short": 128, "shorter": 48}  # networks whose steps take some milliseconds, by their samples per rank
SHORT_BLOCK = 8
SHORT_TARGET, SHORT_ERROR = 1.05, 0.02


def dense(tensors: int, batch: int, width: int | None = None) -> tuple[torch.nn.Module, TensorDataset]:
    """Return layers of a weight and a bias each; more layers are narrower, so that a step stays short."""
    width = width or {8: 256, 10: 1024, 100: 256, 400: 128}[tensors]
    layers = [m for _ in range(tensors // 2) for m in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64 * 2 * batch, width, generator=generator)
    return torch.nn.Sequential(*layers), TensorDataset(x, torch.randint(10, (len(x),), generator=generator))


def convolutional(batch: int) -> tuple[torch.nn.Module, TensorDataset]:
    import demo_rank

    return demo_rank.network(), TensorDataset(*demo_rank.images(32 * 2 * batch, seed=2))


def samples_of(name: str, batch: int) -> int:
    return SHORT.get(name, batch // 4 if name == "convolutional" else batch)


def make(name: str, batch: int) -> tuple[torch.nn.Module, TensorDataset]:
    torch.manual_seed(0)
    if name == "convolutional":
        return convolutional(batch)
    return dense(8 if name in SHORT else int(name.split()[0]), batch)


def endless(loader: object, set_epoch: Callable[[int], None]) -> Iterator:
    for epoch in itertools.count():
        set_epoch(epoch)
        yield from loader


class Kind:
    """A way to train the network, a block at a time."""

    def __init__(
        self, model: torch.nn.Module, batches: Iterator, wrap: Callable[[], torch.optim.Optimizer], unwrap: Callable
    ) -> None:
        self._model, self._batches, self._wrap, self._unwrap = model, batches, wrap, unwrap

    def block(self, steps: int = BLOCK) -> float:
        """Train a block and return its median seconds per step, including the fetching of batches."""
        optimizer = self._wrap()
        took = []
        for _ in range(UNCOUNTED + steps):
            began = time.perf_counter()
            x, y = next(self._batches)
            optimizer.zero_grad()
            functional.cross_entropy(self._model(x), y).backward()
            optimizer.step()
            took.append(time.perf_counter() - began)
        self._unwrap(optimizer)
        return statistics.median(took[UNCOUNTED:])


def kinds_of(
    name: str,
    made: tuple[torch.nn.Module, TensorDataset],
    batch: int,
    policies: Mapping[str, Any],
    stock_batch: int | None = None,
) -> dict[str, Kind]:
    """Return stock Horovod and these policies by the names that their ratios have, on a core for each rank.

    ``stock_batch`` is the size of stock Horovod's batches on this rank, if ranks differ.
    """
    import horovod.torch as hvd

    from hvd_hetero.testing import pin_to_core
    from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

    hvd.init()
    torch.set_num_threads(1)
    pin_to_core(hvd.rank())
    model, data = made
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    names = [(f"{name}.{n}", p) for n, p in model.named_parameters()]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def stock() -> torch.optim.Optimizer:
        optimizer = hvd.DistributedOptimizer(sgd, names)
        optimizer.state = sgd.state
        return optimizer

    def forget_stock(optimizer: Any) -> None:
        optimizer._grad_accs.clear()  # Horovod has no way to take its hooks off again; they live as long as these

    def hear(optimizer: Any) -> Any:
        optimizer._gathered.listen(model.parameters())
        return optimizer

    def ours(policy: Any) -> Kind:
        # One object for all blocks, whose hooks come and go: a new one would learn its buckets in every block, and
        # rounds in which gradients leave only after the backward pass would teach LB-BSP another speed.
        balance = LoadBalance(policy, global_batch=batch * hvd.size())
        loader = BalancedLoader(data, balance, shuffle=True, seed=0)
        optimizer = DistributedOptimizer(sgd, balance, names)
        optimizer._gathered.close()
        return Kind(
            model,
            endless(loader, loader.set_epoch),
            lambda: hear(optimizer),
            lambda optimizer: optimizer._gathered.close(),
        )

    sampler = DistributedSampler(data, hvd.size(), hvd.rank(), shuffle=True, seed=0)
    batches = endless(DataLoader(data, stock_batch or batch, sampler=sampler), sampler.set_epoch)
    return {STOCK: Kind(model, batches, stock, forget_stock)} | {kind: ours(of) for kind, of in policies.items()}


def rank_main(pairs: int, name: str, batch: int) -> None:
    from hvd_hetero.testing import report

    steps, batch = SHORT_BLOCK if name in SHORT else BLOCK, samples_of(name, batch)
    kinds = kinds_of(name, make(name, batch), batch, dict(zip(KINDS, KINDS, strict=True)))
    report(alternate(pairs, name, kinds, steps))


class Ratios:
    """Ratios of one kind on one network, for each launch, pair and rank."""

    def __init__(self) -> None:
        self.launches: list[list[float]] = []

    @property
    def all(self) -> list[float]:
        """Ratios of all launches."""
        return list(itertools.chain(*self.launches))

    @property
    def error(self) -> float:
        """Error of the overall median; infinite for one launch, which cannot show how launches differ."""
        if len(self.launches) < 2:
            return math.inf
        medians = [statistics.median(launch) for launch in self.launches]
        between = statistics.stdev(medians) / math.sqrt(len(medians))
        return max(error_of_median(self.all, len(self.all) // 2), between)


Found = dict[str, Ratios]  # by kind


def row(name: str, of: Found, batch: int) -> str:
    """Return a line of the table."""
    launches = of[KINDS[0]].launches
    cells = [f"{name}, {samples_of(name, batch)} samples", f"{len(launches)} x {len(launches[0]) // 2}"]
    for kind in KINDS:
        low, middle, high = statistics.quantiles(of[kind].all, n=4)
        cells += [f"{middle:.3f}", f"{of[kind].error:.3f}", f"{low:.3f} to {high:.3f}"]
    said = verdict(of, *goal(name))
    if said != "met":  # figures that are rounded might not show why
        said += f": {', '.join(f'{statistics.median(of[k].all):.4f} (error {of[k].error:.4f})' for k in KINDS)}"
    return f"| {' | '.join([*cells, said])} |"


def goal(name: str) -> tuple[float, float]:
    """Return a network's target ratio, and the error above which there is another launch."""
    return (SHORT_TARGET, SHORT_ERROR) if name in SHORT else (TARGET, ERROR)


def table(found: dict[str, Found], batch: int) -> list[str]:
    """Return a row for each network, with its verdict."""
    target, error = goal(next(iter(found)))
    return [
        "Step time over stock Horovod's; two equal ranks, alternating blocks of one run.",
        "",
        "| network | launches x pairs | BSP (median) | error | quartiles | LB-BSP (median) | error | quartiles "
        f"| at most {target} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
        *(row(name, of, batch) for name, of in found.items()),
        "",
        f"All pairs of all launches count; {LAUNCHES} of these, more while an error was above {error}. Undecided is a "
        f"median with a larger error that is less than two errors from {target}.",
    ]


def verdict(of: Found, target: float = TARGET, small: float = ERROR) -> str:
    """Return whether a network meets the target with either kind."""
    return judged([(statistics.median(of[kind].all), of[kind].error) for kind in KINDS], target, small)


def main() -> int:
    from hvd_hetero.testing import KEEP_MEMORY, launch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pairs",
        type=int,
        default=40,
        help=f"blocks of each kind per launch, of which there are {LAUNCHES} to {MOST_LAUNCHES} (default 40)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="some of the networks")
    which.add_argument("--short", action="store_true", help="those whose steps take some milliseconds, instead")
    parser.add_argument(
        "--batch", type=int, default=USUAL, help=f"samples per rank of dense networks (default {USUAL})"
    )
    parser.add_argument("--write", action="store_true", help="store the rows in benchmarks/results, one table of each")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("--pairs must be at least 2: fewer have no quartiles")
    names = list(SHORT) if options.short else options.only
    found: dict[str, Found] = {name: {kind: Ratios() for kind in KINDS} for name in names}
    with Progress() as progress:
        tasks = {name: progress.add_task(f"{name:<15}", total=MOST_LAUNCHES * options.pairs) for name in names}
        examples = str(Path(__file__).resolve().parents[1] / "examples")
        for name, of in found.items():
            for number in range(MOST_LAUNCHES):
                if number >= LAUNCHES and all(ratios.error <= goal(name)[1] for ratios in of.values()):
                    break
                result = launch(
                    __file__, 2, [options.pairs, name, options.batch], timeout_s=3600,
                    env=KEEP_MEMORY | {"PYTHONPATH": examples},
                    on_line=lambda rank, line: progress.advance(tasks[line]) if line in tasks else None,
                )  # fmt: skip
                for kind, ratios in of.items():
                    ratios.launches.append([r for rank in result.reports for r in rank[kind]])
                progress.console.print(row(name, of, options.batch), soft_wrap=True)
                step_s = statistics.median(s for rank in result.reports for s in rank[STOCK_S])
                progress.console.print(f"(a step of stock Horovod's took {1e3 * step_s:.1f} ms)")
            progress.update(tasks[name], total=progress.tasks[tasks[name]].completed)
            if options.write and not options.short:
                usual = "" if options.batch == USUAL else f"_{options.batch}"
                write_result(
                    f"overhead_torch_{name.replace(' ', '_')}{usual}", "\n".join(table({name: of}, options.batch))
                )
    print("\n".join(table(found, options.batch)))
    if options.write and options.short:
        write_result("overhead_torch_short", "\n".join(table(found, options.batch)))
    return 0 if all(verdict(of, *goal(name)) == "met" for name, of in found.items()) else 1


if __name__ == "__main__":
    import sys

    if "HOROVOD_RANK" in os.environ:
        rank_main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    else:
        raise SystemExit(main())
