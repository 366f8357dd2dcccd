"""Two hosts at 100 Mbit/s and 5 ms, one of them half as fast: samples per second beside DDP and stock Horovod.

    sudo python benchmarks/several_hosts.py [--write] [--cycles CYCLES] [--only torchrun horovodrun]

The hosts are network namespaces (`hvd_hetero.testing.Hosts`, which needs root) with a core each. 5 ms is how long a
packet takes from host to host, so a round trip takes 10; each link carries 100 Mbit/s in each direction. The second
host's rank is held to half of a core. The network is the demo's, whose gradients, 0.7 MB, take 55 ms of a link.

In one launch by torchrun, DDP with equal batches, LB-BSP and ElasticBSP train in turns of some rounds, whose order
rotates; in a second one, by horovodrun, stock Horovod, LB-BSP and ElasticBSP. A rate is the samples of all ranks in a
turn over its seconds. Each turn of ours and its neighbour of the stock scheme give one ratio; the table has the median
and its standard error. No absolute time is a result.

ElasticBSP gathers the gradients of some micro-batches per round, so it updates less often for the samples it does; what
a sample is then worth is not measured here.
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
from _report import error_of_median, write_result
from _support import Hosts, hosts_available
from overhead_torch import endless
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvd_hetero.testing import KEEP_MEMORY, launch, pin_to_core, report, slow_down
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

DELAY_S, RATE_BIT_S = 0.005, 100e6
GLOBAL_BATCH, FACTOR = 384, 2.0
ROUNDS = {"stock": 3, "lb-bsp": 3, "elastic-bsp": 1}  # of a turn; a round of ElasticBSP has more samples
FIRST = {"stock": 1, "lb-bsp": 12, "elastic-bsp": 5}  # rounds that do not count: speeds become known
STOCK = {"torchrun": "DDP", "horovodrun": "stock Horovod"}


class Rank:
    """Schemes on one rank of two, the second of which is slow."""

    def __init__(self, launcher: str, rank: int) -> None:
        self.launcher, self.rank = launcher, rank
        self.data = TensorDataset(*demo_rank.images(20 * GLOBAL_BATCH, seed=2))
        self.slowness = slow_down(FACTOR if rank == 1 else 1.0, "auto", fits=True)

    def meet(self) -> None:
        """Wait for the other rank."""
        if self.launcher == "torchrun":
            dist.barrier()
        else:
            demo_rank.hvd.allreduce(torch.zeros(1), name="meet")

    def stock(self) -> Callable[[int], int]:
        """Return a function that trains some rounds by DDP or stock Horovod, equal batches, and returns its samples."""
        model, pace = demo_rank.network(), demo_rank.Pace(self.slowness)
        optimizer: Any = demo_rank.sgd(model)
        called = model
        if self.launcher == "torchrun":
            called = DistributedDataParallel(model)
        else:
            optimizer = demo_rank.hvd.DistributedOptimizer(optimizer, model.named_parameters())
            demo_rank.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        sampler = DistributedSampler(self.data, 2, self.rank, shuffle=True, seed=0, drop_last=True)
        loader = DataLoader(self.data, GLOBAL_BATCH // 2, sampler=sampler, drop_last=True)
        batches: Iterator = endless(loader, sampler.set_epoch)

        def rounds(count: int) -> int:
            for _ in range(count):
                x, y = next(batches)
                optimizer.zero_grad()
                pace.gradient(called, x, y)
                optimizer.step()
            return count * GLOBAL_BATCH // 2

        return rounds

    def balanced(self, policy: str) -> Callable[[int], int]:
        """Return the same for a policy of this project."""
        model, pace = demo_rank.network(), demo_rank.Pace(self.slowness)
        balance = LoadBalance(policy, global_batch=GLOBAL_BATCH)
        loader = BalancedLoader(self.data, balance, shuffle=True, seed=0, drop_last=True)
        optimizer = DistributedOptimizer(demo_rank.sgd(model), balance, model.named_parameters())
        batches: Iterator = endless(loader, loader.set_epoch)

        def rounds(count: int) -> int:
            samples, until = 0, balance.rounds + count
            while balance.rounds < until:
                x, y = next(batches)
                optimizer.zero_grad()
                pace.gradient(model, x, y)
                optimizer.step()
                samples += len(x)
            return samples

        return rounds

    def run(self, cycles: int) -> dict[str, list[tuple[int, float]]]:
        """Return this rank's samples and the seconds of each turn, by scheme."""
        schemes = {name: self.stock() if name == "stock" else self.balanced(name) for name in ROUNDS}
        for name, rounds in schemes.items():
            rounds(FIRST[name])
        turns: dict[str, list[tuple[int, float]]] = {name: [] for name in schemes}
        names = list(schemes)
        for cycle in range(-1, cycles):  # one that does not count
            for name in names[cycle % 3 :] + names[: cycle % 3]:
                self.meet()
                began = time.perf_counter()
                samples = schemes[name](ROUNDS[name])
                if cycle >= 0:
                    turns[name].append((samples, time.perf_counter() - began))
            if self.rank == 0:
                print(f"{self.launcher}: turn {cycle + 1} of {cycles}", flush=True)
        return turns


def rank_main(launcher: str, cycles: int) -> None:
    number = int(os.environ["RANK" if launcher == "torchrun" else "HOROVOD_RANK"])
    pin_to_core(number)  # before there are threads of Gloo's, which inherit it
    torch.set_num_threads(1)
    if launcher == "torchrun":
        dist.init_process_group("gloo")
    else:
        demo_rank.hvd.init()
    rank = Rank(launcher, number)
    with rank.slowness:
        report({"turns": rank.run(cycles), "slowness": rank.slowness.describe()})
    if launcher == "torchrun":
        dist.destroy_process_group()


def row(launcher: str, scheme: str, reports: Any) -> str:
    """Return a line of the table."""
    rates = {
        name: [
            sum(samples for samples, _ in ranks) / max(seconds for _, seconds in ranks)
            for ranks in zip(*(each["turns"][name] for each in reports), strict=True)
        ]
        for name in ("stock", scheme)
    }
    ratios = [ours / stock for ours, stock in zip(rates[scheme], rates["stock"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    cells = [f"{scheme} over {STOCK[launcher]}", launcher, str(len(ratios)), f"{middle:.2f}"]
    return f"| {' | '.join(cells)} | {error_of_median(ratios, len(ratios)):.2f} | {low:.2f} to {high:.2f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=12, help="turns of each scheme (default 12)")
    parser.add_argument("--only", nargs="+", choices=list(STOCK), default=list(STOCK), help="one launcher")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    if options.cycles < 2:
        parser.error("--cycles must be at least 2: fewer have no quartiles")
    if not (support := hosts_available()):
        parser.error(support.why)
    rows = ["| samples per second | started by | turns | median | error | quartiles |", "|---|---|---:|---:|---:|---|"]
    slowness = ""
    env = KEEP_MEMORY | {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "examples")}
    with Hosts(2, delay_s=DELAY_S, rate_bit_s=RATE_BIT_S) as hosts:
        for launcher in options.only:
            starter = getattr(hosts, launcher)()
            arguments = [launcher, options.cycles]
            reports = launch(
                __file__, 2, arguments, timeout_s=600, env=env, starter=starter,
                on_line=lambda rank, line: print(line, flush=True) if rank == 0 else None,
            ).reports  # fmt: skip
            rows += [row(launcher, scheme, reports) for scheme in ("lb-bsp", "elastic-bsp")]
            slowness = reports[1]["slowness"]
            print("\n".join(rows[-2:]), flush=True)
    text = "\n".join([
        "Two hosts with 100 Mbit/s and 5 ms between them, one half as fast: ratios of neighbouring turns.",
        "", *rows, "", f"The second rank was {slowness}.",
    ])  # fmt: skip
    print(text)
    if options.write:
        write_result("several_hosts", text)
    return 0


if __name__ == "__main__":
    if "RANK" in os.environ or "HOROVOD_RANK" in os.environ:
        rank_main(sys.argv[1], int(sys.argv[2]))
    else:
        raise SystemExit(main())
