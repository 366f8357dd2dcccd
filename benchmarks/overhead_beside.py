"""Scaled losses beside DDP and FSDP2: step time over that of the same reducer alone, with PyTorch's loader.

    python benchmarks/overhead_beside.py [--write] [--only NAME ...] [--pairs PAIRS] [--cycles CYCLES]

Two equal ranks of one torchrun job, Gloo, a core each. PyTorch's ``DistributedSampler`` and ``DataLoader``, BSP and
LB-BSP of this project (``BalancedLoader``, ``balance.scale``) train one model, in one reducer, in alternating blocks of
about 0.4 s. In such a time two tables travel, so a block's figure is the mean of its steps. Each block of ours and its
neighbour without give one ratio; the table has the median of all ratios of both ranks, and its standard error. Hooks of
layers are put on for a block and taken off after it. Networks are those of `overhead_torch.py`; under FSDP2 each layer
of weights is a group of its own.

*One of two ranks at half speed*: samples per second beside DDP, in turns of three rounds of 384 samples. DDP with equal
batches, LB-BSP with a scaled loss, the oracle of `overhead_ddp.py` with a scaled loss, and the fast rank alone, which
does the whole batch.
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

import demo_rank
import torch
import torch.distributed as dist
from _alternating import STOCK, STOCK_S, alternate
from _report import error_of_median, judged, write_result
from overhead_ddp import GLOBAL_BATCH, Half
from overhead_torch import KINDS, NETWORKS, SHORT, endless, make, samples_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from hvd_hetero.testing import KEEP_MEMORY, launch, pin_to_core, report, torchrun
from torch_hooks import BalancedLoader, LoadBalance
from torch_hooks.beside import scaled_rounds
from torch_hooks.beside.layers import leave_out_waits

REDUCERS = ("DDP", "FSDP2")
NAMES = (*SHORT, *(name for name in NETWORKS if name != "400 tensors"))
BLOCK_S, UNCOUNTED = 0.4, 2
SHORT_S, SHORT_TARGET, TARGET = 20e-3, 1.03, 1.01  # steps below 20 ms have the looser target
HALF_TARGET = 0.98


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
        scaled_rounds._here.__dict__.clear()  # steps of other kinds are none of this one's
        return statistics.fmean(took[UNCOUNTED:])

    def _hear(self) -> list[Any]:
        if self._balance is None:
            return []
        session = self._balance._session
        if session.beside is None:  # made by the first batch, with hooks that stay
            session.require_reducer()
            session.beside._let_go()
        scaled_rounds._here.beside = lambda: session.beside
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


class HalfBeside(Half):
    """Schemes beside DDP on one rank of two, the second of which is slow."""

    def balanced(self, policy: Any) -> tuple[Iterator[None], LoadBalance]:
        """Return the rounds of a policy beside DDP, and its balancer."""
        model, pace = demo_rank.network(), demo_rank.Pace(self.slowness)
        optimizer, wrapped = demo_rank.sgd(model), DistributedDataParallel(model)
        balance = LoadBalance(policy, global_batch=GLOBAL_BATCH)
        loader = BalancedLoader(self.data, balance, shuffle=True, seed=0, drop_last=True)

        def rounds() -> Iterator[None]:
            for x, y in endless(loader, loader.set_epoch):
                optimizer.zero_grad()
                pace.gradient(wrapped, x, y, scale=balance.scale)
                optimizer.step()
                yield

        return rounds(), balance

    def alone(self) -> Iterator[None]:
        """Train the whole batch on the fast rank; the other waits."""
        model, pace = demo_rank.network(), demo_rank.Pace(self.slowness)
        optimizer = demo_rank.sgd(model)
        loader = DataLoader(self.data, GLOBAL_BATCH, shuffle=True, drop_last=True)
        for x, y in endless(loader, lambda epoch: None):
            if dist.get_rank() == 0:
                optimizer.zero_grad()
                pace.gradient(model, x, y)
                optimizer.step()
            yield

    def others(self) -> dict[str, Iterator[None]]:
        """Return the fast rank alone."""
        return {"alone": self.alone()}

    def end_turn(self) -> None:
        """End a turn on both ranks, and tell the schemes apart: steps of others are none of this one's."""
        scaled_rounds._here.__dict__.clear()
        dist.barrier()


def rank_main(reducer: str, name: str, pairs: int) -> None:
    pin_to_core(int(os.environ["LOCAL_RANK"]))  # before there are threads of Gloo's, which inherit it
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if name == "half":
        half = HalfBeside()
        with half.slowness:
            report(half.run(pairs))
        return
    kinds = kinds_of(reducer, name, samples_of(name, 256))
    shortest = torch.tensor(min(kinds[STOCK].block(5) for _ in range(3)))
    dist.all_reduce(shortest)  # the same number of steps on both ranks
    report(alternate(pairs, name, kinds, max(round(BLOCK_S / (shortest.item() / dist.get_world_size())), 2)))


def measured(reducer: str, name: str, pairs: int) -> tuple[str, bool]:
    """Return a row of the table, and whether the target is met."""
    reports = launched(reducer, name, pairs)
    values = [[r for rank in reports for r in rank[kind]] for kind in KINDS]
    found = [(statistics.median(of), error_of_median(of, pairs)) for of in values]
    step_s = statistics.median(s for rank in reports for s in rank[STOCK_S])
    target = SHORT_TARGET if step_s < SHORT_S else TARGET
    said = judged(found, target, 0.005)
    cells = " | ".join(f"{median:.3f} | {error:.3f}" for median, error in found)
    return f"| {reducer} | {name} | {pairs} | {cells} | {1e3 * step_s:.0f} ms | {target:.2f} | {said} |", said == "met"


def launched(reducer: str, name: str, times: int) -> Any:
    env = KEEP_MEMORY | {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "examples")}
    return launch(__file__, 2, [reducer, name, times], timeout_s=900, env=env, starter=torchrun(2)).reports


def half_speed(cycles: int) -> tuple[list[str], bool]:
    """Return the table of rates with one rank at half speed, and whether the target is met."""
    told = launched("DDP", "half", cycles)
    rates = told[0]["rates"]
    rows = ["| rates | turns | median | error |", "|---|---:|---:|---:|"]
    for one, other in (("lb-bsp", "oracle"), ("lb-bsp", "ddp"), ("lb-bsp", "alone"), ("ddp", "alone")):
        ratios = [a / b for a, b in zip(rates[one], rates[other], strict=True)]
        median, error = statistics.median(ratios), error_of_median(ratios, cycles)
        rows.append(f"| {one} over {other} | {cycles} | {median:.3f} | {error:.3f} |")
    rows += ["", f"The oracle's split is {told[0]['split']}, LB-BSP's last one {told[0]['now']}. {told[1]['slowness']}"]
    oracle = statistics.median(a / b for a, b in zip(rates["lb-bsp"], rates["oracle"], strict=True))
    return [*rows, "", f"Target: {HALF_TARGET} of the oracle."], oracle >= HALF_TARGET


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*NAMES, "half"), default=[*NAMES, "half"])
    parser.add_argument("--cycles", type=int, default=30, help="turns of each scheme at half speed (default 30)")
    parser.add_argument("--reducers", nargs="+", choices=REDUCERS, default=list(REDUCERS))
    parser.add_argument("--pairs", type=int, default=40, help="blocks of each kind (default 40)")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    heads = ("reducer", "network", "pairs", "BSP", "error", "LB-BSP", "error", "a step alone", "at most", "")
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    met = True
    if "half" in options.only:
        half, met = half_speed(options.cycles)
        said = "One of two ranks at half speed, beside DDP: samples per second, ratios of the same cycle."
        print("\n".join([said, "", *half]))
        if options.write:
            write_result("overhead_beside_half", "\n".join([said, "", *half]))
    if options.only == ["half"]:
        return 0 if met else 1
    for reducer in options.reducers:
        for name in (name for name in options.only if name != "half"):
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
