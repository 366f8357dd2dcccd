"""Scaled losses beside DDP and FSDP2: step time over that of the same reducer alone, with PyTorch's loader.

    python benchmarks/overhead_beside.py [--write] [--only NAME ...] [--pairs PAIRS]

Two equal ranks of one torchrun job, Gloo, a core each. PyTorch's ``DistributedSampler`` and ``DataLoader``, BSP and
LB-BSP of this project (``BalancedLoader``, ``balance.scale``) train one model, in one reducer, in alternating blocks of
about 0.4 s. In such a time two tables travel, so a block's figure is the mean of its steps. Each block of ours and its
neighbour without give one ratio; the table has the median of all ratios of both ranks, and its standard error. Hooks of
layers are put on for a block and taken off after it. Networks are those of `overhead_torch.py`; under FSDP2 each layer
of weights is a group of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
import torch.distributed as dist
from _alternating import STOCK, STOCK_S, alternate
from _report import error_of_median, judged, write_result
from overhead_torch import KINDS, NETWORKS, SHORT, endless, make, samples_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from hvd_hetero.testing import KEEP_MEMORY, launch, pin_to_core, report, torchrun
from torch_hooks import BalancedLoader, LoadBalance
from torch_hooks.beside import rounds
from torch_hooks.beside.layers import leave_out_waits

REDUCERS = ("DDP", "FSDP2")
NAMES = (*SHORT, *(name for name in NETWORKS if name != "400 tensors"))
BLOCK_S, UNCOUNTED = 0.4, 2
SHORT_S, SHORT_TARGET, TARGET = 20e-3, 1.03, 1.01  # steps below 20 ms have the looser target


class Kind:
    """A way to train the model, a block at a time; ``scale`` takes a loss to the one that is propagated."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Iterator[Any],
        scale: Callable[[Any], Any],
        balance: LoadBalance | None = None,
    ) -> None:
        self._model, self._optimizer, self._batches, self._scale = model, optimizer, batches, scale
        self._balance = balance

    def block(self, steps: int) -> float:
        """Train a block and return its mean seconds per step, including the fetching of batches."""
        hooks = self._hear()
        took = []
        for _ in range(UNCOUNTED + steps):
            began = time.perf_counter()
            x, y = next(self._batches)
            self._optimizer.zero_grad()
            self._scale(functional.cross_entropy(self._model(x), y)).backward()
            self._optimizer.step()
            took.append(time.perf_counter() - began)
        for hook in hooks:
            hook.remove()
        rounds._here.__dict__.clear()  # steps of other kinds are none of this one's
        return statistics.fmean(took[UNCOUNTED:])

    def _hear(self) -> list[Any]:
        if self._balance is None:
            return []
        session = self._balance._session
        if session.beside is None:  # made by the first batch, with hooks that stay
            session.require_reducer()
            session.beside._let_go()
        rounds._here.beside = lambda: session.beside
        return leave_out_waits(session.meter)


def kinds_of(reducer: str, name: str, batch: int) -> dict[str, Kind]:
    """Return the reducer alone, and this project's policies, on the same tensors."""
    model, data = make(name, batch)
    if reducer == "DDP":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in list(model.modules()):
            if list(layer.parameters(recurse=False)):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def ours(policy: str) -> Kind:
        balance = LoadBalance(policy, global_batch=batch * ranks)
        loader = BalancedLoader(data, balance, shuffle=True, seed=0)
        return Kind(model, sgd, endless(loader, loader.set_epoch), balance.scale, balance)

    sampler = DistributedSampler(data, ranks, rank, shuffle=True, seed=0)
    batches = endless(DataLoader(data, batch, sampler=sampler), sampler.set_epoch)
    return {STOCK: Kind(model, sgd, batches, lambda loss: loss)} | {policy: ours(policy) for policy in KINDS}


def rank_main(reducer: str, name: str, pairs: int) -> None:
    pin_to_core(int(os.environ["LOCAL_RANK"]))  # before there are threads of Gloo's, which inherit it
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kinds = kinds_of(reducer, name, samples_of(name, 256))
    shortest = torch.tensor(min(kinds[STOCK].block(5) for _ in range(3)))
    dist.all_reduce(shortest)  # the same number of steps on both ranks
    report(alternate(pairs, name, kinds, max(round(BLOCK_S / (shortest.item() / dist.get_world_size())), 2)))


def measured(reducer: str, name: str, pairs: int) -> tuple[str, bool]:
    """Return a row of the table, and whether the target is met."""
    env = KEEP_MEMORY | {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "examples")}
    reports = launch(__file__, 2, [reducer, name, pairs], timeout_s=900, env=env, starter=torchrun(2)).reports
    values = [[r for rank in reports for r in rank[kind]] for kind in KINDS]
    found = [(statistics.median(of), error_of_median(of, pairs)) for of in values]
    step_s = statistics.median(s for rank in reports for s in rank[STOCK_S])
    target = SHORT_TARGET if step_s < SHORT_S else TARGET
    said = judged(found, target, 0.005)
    cells = " | ".join(f"{median:.3f} | {error:.3f}" for median, error in found)
    return f"| {reducer} | {name} | {pairs} | {cells} | {1e3 * step_s:.0f} ms | {target:.2f} | {said} |", said == "met"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--reducers", nargs="+", choices=REDUCERS, default=list(REDUCERS))
    parser.add_argument("--pairs", type=int, default=40, help="blocks of each kind (default 40)")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    heads = ("reducer", "network", "pairs", "BSP", "error", "LB-BSP", "error", "a step alone", "at most", "")
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    met = True
    for reducer in options.reducers:
        for name in options.only:
            row, good = measured(reducer, name, options.pairs)
            print(row, flush=True)
            rows.append(row)
            met &= good
    said = "Two equal ranks, scaled losses beside a reducer: step time over that of the reducer alone, in one launch."
    print("\n".join(["", said, "", *rows]))
    if options.write:
        write_result("overhead_beside", "\n".join([said, "", *rows]))
    return 0 if met else 1


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        raise SystemExit(main())
