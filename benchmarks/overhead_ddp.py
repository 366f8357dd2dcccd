"""torch.distributed as the wire: step time over PyTorch's DDP, and LB-BSP beside a split set by hand.

    python benchmarks/overhead_ddp.py [--write] [--only NAME ...] [--pairs PAIRS] [--cycles CYCLES]

Two ranks of one torchrun job, Gloo, a core each. *Equal ranks*: DDP as it comes (the stock sampler), BSP and LB-BSP of
this project train one network in alternating blocks of two rounds; networks, blocks, and the order of blocks are those
of `overhead_torch.py`. Each block of ours and its neighbour of DDP give one ratio of median step times; the table has
the median of all ratios of both ranks, and its standard error. All kinds train the very same tensors: DDP is made for a
block and dropped after it, and the first two steps of its blocks do not count, in which it forms its buckets (of ours,
the first one: caches hold the others' data). There is one launch for each network, so what differs between launches (a
per cent, in `overhead_torch.py`) is not in the errors.

*One of two ranks at half speed*: samples per second of DDP with equal batches, of LB-BSP, and of the oracle, in turns
of three rounds of 384 samples. The oracle has a split that was tuned beforehand and is kept for all turns: with t_i the
median seconds that rank i is at work in 12 rounds at the split x, a pass sets x_i in proportion to x_i / t_i, and there
are four passes. A person would set it so by hand.
"""

from __future__ import annotations

import argparse
import gc
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
from _alternating import STOCK, STOCK_S, alternate, in_turns
from _by_hand import PASS, PASSES, ByHand
from _report import error_of_median, judged, write_result
from overhead_torch import BLOCK, KINDS, NETWORKS, TARGET, endless, make, samples_of
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvd_hetero.testing import KEEP_MEMORY, launch, pin_to_core, report, slow_down, torchrun
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

GLOBAL_BATCH, TURN, FACTOR = 384, 3, 2.0
FIRST = 12  # rounds in which LB-BSP finds its split
ORACLE_TARGET, DDP_TARGET = 0.97, 1.5


class Kind:
    """A way to train the network, a block at a time; ``wrap`` gives what is called and what steps."""

    def __init__(
        self, batches: Iterator, wrap: Callable[[], tuple[Any, Any]], unwrap: Callable, uncounted: int = 1
    ) -> None:
        self._batches, self._wrap, self._unwrap, self._uncounted = batches, wrap, unwrap, uncounted

    def block(self, steps: int = BLOCK) -> float:
        """Train a block and return its median seconds per step, including the fetching of batches."""
        model, optimizer = self._wrap()
        took = []
        for _ in range(self._uncounted + steps):
            began = time.perf_counter()
            x, y = next(self._batches)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            took.append(time.perf_counter() - began)
        del model, optimizer
        self._unwrap()
        return statistics.median(took[self._uncounted :])


def kinds_of(name: str, batch: int) -> dict[str, Kind]:
    """Return DDP and this project's policies, on the same tensors."""
    model, data = make(name, batch)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def ours(policy: str) -> Kind:
        balance = LoadBalance(policy, global_batch=batch * ranks)
        loader = BalancedLoader(data, balance, shuffle=True, seed=0)
        optimizer = DistributedOptimizer(sgd, balance, model.named_parameters())
        listener = optimizer._gathered  # one optimizer for all blocks, whose hooks come and go
        listener.close()

        def hear() -> tuple[Any, Any]:
            listener.listen(model.parameters())
            return model, optimizer

        return Kind(endless(loader, loader.set_epoch), hear, listener.close)

    sampler = DistributedSampler(data, ranks, rank, shuffle=True, seed=0)
    batches = endless(DataLoader(data, batch, sampler=sampler), sampler.set_epoch)
    ddp = Kind(batches, lambda: (DistributedDataParallel(model), sgd), gc.collect, uncounted=2)
    return {STOCK: ddp} | {policy: ours(policy) for policy in KINDS}


class Half:
    """Schemes on one rank of two, the second of which is slow."""

    def __init__(self) -> None:
        self.data = TensorDataset(*demo_rank.images(20 * GLOBAL_BATCH, seed=2))
        self.slowness = slow_down(FACTOR if dist.get_rank() == 1 else 1.0, "auto", fits=True)

    def ddp(self) -> Iterator[None]:
        """Train by DDP with equal batches."""
        model, pace = demo_rank.network(), demo_rank.Pace(self.slowness)
        optimizer = demo_rank.sgd(model)
        wrapped = DistributedDataParallel(model)
        sampler = DistributedSampler(self.data, 2, dist.get_rank(), shuffle=True, seed=0, drop_last=True)
        loader = DataLoader(self.data, GLOBAL_BATCH // 2, sampler=sampler, drop_last=True)
        for x, y in endless(loader, sampler.set_epoch):
            optimizer.zero_grad()
            pace.gradient(wrapped, x, y)
            optimizer.step()
            yield

    def balanced(self, policy: Any) -> tuple[Iterator[None], LoadBalance]:
        """Return the rounds of a policy of this project, and its balancer."""
        model, pace = demo_rank.network(), demo_rank.Pace(self.slowness)
        balance = LoadBalance(policy, global_batch=GLOBAL_BATCH)
        loader = BalancedLoader(self.data, balance, shuffle=True, seed=0, drop_last=True)
        optimizer = DistributedOptimizer(demo_rank.sgd(model), balance, model.named_parameters())

        def rounds() -> Iterator[None]:
            for x, y in endless(loader, loader.set_epoch):
                optimizer.zero_grad()
                pace.gradient(model, x, y)
                optimizer.step()
                yield

        return rounds(), balance

    def run(self, cycles: int) -> dict[str, Any]:
        """Return each scheme's samples per second, turn by turn, and the oracle's split."""
        lb_bsp, balance = self.balanced("lb-bsp")
        oracle, by_hand = self.balanced(ByHand())
        for _ in range(FIRST):
            next(lb_bsp)
        for _ in range(PASSES * PASS + 3):  # a table may come two rounds late
            next(oracle)
        split = list(by_hand.plan)
        schemes = {"ddp": self.ddp(), "lb-bsp": lb_bsp, "oracle": oracle}
        took = in_turns(schemes, cycles, TURN, dist.barrier)
        rates = {name: [TURN * GLOBAL_BATCH / each for each in seconds] for name, seconds in took.items()}
        return {"rates": rates, "split": split, "now": list(balance.plan), "slowness": self.slowness.describe()}


def rank_main(what: str, times: int) -> None:
    pin_to_core(int(os.environ["LOCAL_RANK"]))  # before there are threads of Gloo's, which inherit it
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if what == "half":
        half = Half()
        with half.slowness:
            report(half.run(times))
    else:
        report(alternate(times, what, kinds_of(what, samples_of(what, 256)), BLOCK))
    dist.destroy_process_group()


def medians(values: dict[str, list[float]], independent: int) -> dict[str, tuple[float, float]]:
    """Return each median with its standard error."""
    return {name: (statistics.median(of), error_of_median(of, independent)) for name, of in values.items()}


def equal_ranks(names: list[str], pairs: int) -> tuple[list[str], bool]:
    """Return the table of step times, and whether the target is met."""
    rows = ["| network | pairs | BSP | error | LB-BSP | error | a step of DDP | at most 1.01 |", "|---" * 8 + "|"]
    met = True
    for name in names:
        reports = run(name, pairs)
        found = medians({kind: [r for rank in reports for r in rank[kind]] for kind in KINDS}, pairs)
        said = judged(list(found.values()), TARGET, 0.005)
        step_s = statistics.median(s for rank in reports for s in rank[STOCK_S])
        cells = [f"{median:.3f} | {error:.3f}" for median, error in found.values()]
        rows.append(f"| {name} | {pairs} | {' | '.join(cells)} | {1e3 * step_s:.0f} ms | {said} |")
        print(rows[-1], flush=True)
        met &= said == "met"
    return rows, met


def half_speed(cycles: int) -> tuple[list[str], bool]:
    """Return the table of rates with one rank at half speed, and whether the targets are met."""
    told = run("half", cycles)
    rates = told[0]["rates"]
    pairs = {f"LB-BSP over {other}": [a / b for a, b in zip(rates["lb-bsp"], rates[other], strict=True)]
             for other in ("oracle", "ddp")}  # fmt: skip
    found = medians(pairs, cycles)
    rows = ["| rates | turns | median | error |", "|---|---:|---:|---:|"]
    rows += [f"| {name} | {cycles} | {median:.3f} | {error:.3f} |" for name, (median, error) in found.items()]
    rows += ["", f"The oracle's split is {told[0]['split']}, LB-BSP's last one {told[0]['now']}. {told[1]['slowness']}"]
    (oracle, _), (ddp, _) = found.values()
    return rows, oracle >= ORACLE_TARGET and ddp >= DDP_TARGET


def run(what: str, times: int) -> Any:
    env = KEEP_MEMORY | {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "examples")}
    return launch(__file__, 2, [what, times], timeout_s=900, env=env, starter=torchrun(2)).reports


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*NETWORKS, "half"), default=[*NETWORKS, "half"])
    parser.add_argument("--pairs", type=int, default=60, help="blocks of each kind (default 60)")
    parser.add_argument("--cycles", type=int, default=30, help="turns of each scheme (default 30)")
    parser.add_argument("--write", action="store_true", help="store the tables in benchmarks/results")
    options = parser.parse_args()
    tables, met = {}, True
    if names := [name for name in NETWORKS if name in options.only]:
        rows, met = equal_ranks(names, options.pairs)
        said = "Two equal ranks: step time over DDP's, medians of pairs of blocks of one launch."
        tables["overhead_ddp_equal"] = [said, "", *rows]
    if "half" in options.only:
        rows, also = half_speed(options.cycles)
        said = "One of two ranks at half speed: samples per second, ratios of the same cycle."
        targets = f"Targets: {ORACLE_TARGET} of the oracle, {DDP_TARGET} times DDP."
        tables["overhead_ddp_half"] = [said, "", *rows, "", targets]
        met &= also
    for name, lines in tables.items():
        print("\n".join(["", *lines]))
        if options.write:
            write_result(name, "\n".join(lines))
    return 0 if met else 1


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(sys.argv[1], int(sys.argv[2]))
    else:
        raise SystemExit(main())
