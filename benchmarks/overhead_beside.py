"""Scaled losses beside DDP, FSDP2 and Horovod's own optimizer: what they cost on equal ranks, and gain on unequal ones.

    python benchmarks/overhead_beside.py [--write] [--only GROUP ...] [--reducers REDUCER ...]
                                         [--pairs PAIRS] [--cycles CYCLES]

Ranks of one job, Gloo. Each group is one table.

*equal*: two ranks, a core each, at steps of about 10, 30 and 100 ms. PyTorch's ``DistributedSampler`` and
``DataLoader``, BSP and LB-BSP of this project (``BalancedLoader``, ``balance.scale``) train one model, in one reducer,
in alternating blocks of about 0.4 s. In such a time two tables travel, so a block's figure is the mean of its steps.
Each block of ours gives one ratio to that of the reducer alone in the same cycle; the table has the median of all
ratios of both ranks, and its standard error. Hooks of layers are put on for a block and taken off after it. The network
is the short one of `overhead_torch.py`, and its batch is chosen so that a step of the reducer alone takes about as long
as said. Under FSDP2 each layer of weights is a group of its own, but for the shortest steps, where the model is one.

*half* and *three*: one of two ranks at half speed, and three ranks at 1 : 1/2 : 1/3. Samples per second in turns of
three rounds of 128 samples: the reducer with equal batches, LB-BSP with a scaled loss, a split set by hand with a
scaled loss (`_by_hand.py`, whose tables and scaling cost as much as LB-BSP's), and the fast rank alone, which does the
whole batch in one process while the others wait. Two networks: the demo's convolutional one, and a transformer. The
first rank has a core to itself, and the others share one. Own times are what LB-BSP's training measures of each rank
(computing and its own data, per sample), over the same steps of that rank in plain PyTorch while all others rest.
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
import numpy as np
import torch
import torch.distributed as dist
from _alternating import STOCK, STOCK_S, alternate, forget_training, in_turns
from _by_hand import PASS, PASSES, ByHand
from _report import error_of_median, judged, write_result
from gpu.networks import Transformer, reduced
from overhead_torch import KINDS, dense, endless
from rich.progress import Progress
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvd_hetero import late_tables
from hvd_hetero.testing import KEEP_MEMORY, launch, pin_to_core, report, slow_down, torchrun
from torch_hooks import BalancedLoader, LoadBalance
from torch_hooks.beside.layers import leave_out_waits

REDUCERS = ("DDP", "FSDP2", "Horovod")
GROUPS = {"equal": (1.0, 1.0), "half": (1.0, 2.0), "three": (1.0, 2.0, 3.0)}  # by how much each rank is slower
TITLES = {
    "equal": "Two equal ranks, scaled losses beside a reducer: step time over that of the reducer alone.",
    "half": "One of two ranks at half speed: samples per second of LB-BSP, with a scaled loss, over those of others.",
    "three": "Three ranks at 1 : 1/2 : 1/3: samples per second of LB-BSP, with a scaled loss, over those of others.",
}
STEPS_MS = (10, 30, 100)
BLOCK_S, UNCOUNTED = 0.4, 2
SHORT_S, SHORT_TARGET, TARGET = 20e-3, 1.03, 1.01  # steps below 20 ms have the looser target
GLOBAL_BATCH, TURN, FIRST = 128, 3, 20  # FIRST: rounds in which LB-BSP finds its split
HALF_TARGET, OWN_TARGET = 0.98, 0.05  # of the split set by hand, and how far own times may be from those alone
TICK = "done"  # what rank 0 prints after each pair of blocks, and after each cycle of turns


class Ranks:
    """The job that this process belongs to, over torch.distributed or Horovod."""

    def __init__(self, reducer: str) -> None:
        self._reducer = reducer
        rank = int(os.environ["HOROVOD_RANK" if reducer == "Horovod" else "RANK"])
        pin_to_core(min(rank, 1))  # before there are threads of Gloo's, which inherit it
        torch.set_num_threads(1)
        if reducer == "Horovod":
            import horovod.torch as hvd

            hvd.init()
            self.rank, self.size = hvd.rank(), hvd.size()
            self._mean = hvd.allreduce
        else:
            dist.init_process_group("gloo")
            self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def mean(self, number: float) -> float:
        """Return the mean over the ranks, which is the same on all."""
        if self._reducer == "Horovod":
            return float(self._mean(torch.tensor(number), name="mean"))
        total = torch.tensor(number)
        dist.all_reduce(total)
        return total.item() / self.size

    def reduced(self, model: torch.nn.Module, *, apart: bool = True) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Return a model and an optimizer whose gradients are reduced. ``apart``: FSDP2 shards each layer by itself."""
        if self._reducer != "Horovod":
            model = reduced(model, self._reducer, "cpu", apart=apart)
        optimizer = demo_rank.sgd(model)
        if self._reducer == "Horovod":
            import horovod.torch as hvd

            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        return model, optimizer

    def stock_batches(self, data: TensorDataset, batch: int) -> Iterator[Any]:
        """Return equal batches without end, by PyTorch's own sampler and loader."""
        sampler = DistributedSampler(data, self.size, self.rank, shuffle=True, seed=0)
        return endless(DataLoader(data, batch, sampler=sampler, drop_last=True), sampler.set_epoch)


def balanced(data: TensorDataset, policy: Any, global_batch: int) -> tuple[Iterator[Any], LoadBalance]:
    """Return batches of a policy without end, and its balancer."""
    balance = LoadBalance(policy, global_batch=global_batch)
    loader = BalancedLoader(data, balance, shuffle=True, seed=0, drop_last=True)
    return endless(loader, loader.set_epoch), balance


class Kind:
    """A way to train the model, a block at a time; ``scale`` takes a loss to the one that is propagated."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Iterator[Any],
        balance: LoadBalance | None = None,
    ) -> None:
        self._model, self._optimizer, self._batches, self._balance = model, optimizer, batches, balance
        self._scale: Callable[[Any], Any] = (lambda loss: loss) if balance is None else balance.scale

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
        forget_training()
        return statistics.fmean(took[UNCOUNTED:])

    def _hear(self) -> list[Any]:
        if self._balance is None:
            return []
        session = self._balance._session
        if session.beside is None:  # made by the first batch, with hooks that stay
            session.require_reducer()
            session.beside._let_go()
        return leave_out_waits(session.meter)


def equal(ranks: Ranks, step_ms: int, pairs: int) -> dict[str, Any]:
    """Return the ratios of the policies to the reducer alone, on the same tensors."""
    torch.manual_seed(0)
    layers, data = dense(8, 512)
    model, optimizer = ranks.reduced(layers, apart=step_ms > STEPS_MS[0])

    def seconds(samples: int) -> float:
        return ranks.mean(min(Kind(model, optimizer, ranks.stock_batches(data, samples)).block(3) for _ in range(3)))

    few, many = 16, 128
    few_s, many_s = seconds(few), seconds(many)
    batch = round(few + (1e-3 * step_ms - few_s) * (many - few) / max(many_s - few_s, 1e-4))
    batch = min(max(batch, few), 16 * many)
    kinds = {STOCK: Kind(model, optimizer, ranks.stock_batches(data, batch))}
    for policy in KINDS:
        kinds[policy] = Kind(model, optimizer, *balanced(data, policy, batch * ranks.size))
    steps = max(round(BLOCK_S / seconds(batch)), 2)
    return {"batch": batch} | alternate(pairs, TICK, kinds, steps)


def network(name: str) -> tuple[torch.nn.Module, TensorDataset]:
    """Return a network of this name, and its samples of ten classes."""
    if name == "convolutional":
        return demo_rank.network(), TensorDataset(*demo_rank.images(20 * GLOBAL_BATCH, seed=2))
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1000, (20 * GLOBAL_BATCH, 32), generator=generator)
    return Transformer(96, 2), TensorDataset(tokens, tokens[:, 0] % 10)


def unequal(ranks: Ranks, name: str, factors: tuple[float, ...], cycles: int) -> dict[str, Any]:
    """Return each scheme's samples per second, turn by turn, and the splits."""
    slowness = slow_down(factors[ranks.rank], "auto", fits=True)
    data = network(name)[1]

    def steps(
        batches: Iterator[Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer, scale: Any = lambda loss: loss
    ) -> Iterator[None]:
        pace = demo_rank.Pace(slowness)
        for x, y in batches:
            optimizer.zero_grad()
            pace.gradient(model, x, y, scale)
            optimizer.step()
            yield

    def alone() -> Iterator[None]:
        if ranks.rank:
            while True:
                yield
        model = network(name)[0]
        loader = DataLoader(data, GLOBAL_BATCH, shuffle=True, drop_last=True)
        yield from steps(endless(loader, lambda epoch: None), model, demo_rank.sgd(model))

    def scaled(policy: Any, rounds: int) -> tuple[Iterator[None], LoadBalance]:
        batches, balance = balanced(data, policy, GLOBAL_BATCH)
        trained = steps(batches, *ranks.reduced(network(name)[0]), balance.scale)
        for _ in range(rounds):
            next(trained)
        forget_training()
        return trained, balance

    with slowness:
        usual, late_tables._SUM_CPU_S = late_tables._SUM_CPU_S, 0.0  # a table each round: splits are found in few
        lb_bsp, balance = scaled("lb-bsp", FIRST)
        by_hand, oracle = scaled(ByHand(), PASSES * PASS + 3)  # a table may come two rounds late
        oracle._session.beside._let_go()  # it measures no more
        late_tables._SUM_CPU_S = usual
        stock = steps(ranks.stock_batches(data, GLOBAL_BATCH // ranks.size), *ranks.reduced(network(name)[0]))
        of_turn = dict.fromkeys(("by hand", "lb-bsp", "alone"), TURN * GLOBAL_BATCH)
        of_turn["stock"] = TURN * (GLOBAL_BATCH // ranks.size * ranks.size)
        schemes = {"stock": stock, "by hand": by_hand, "lb-bsp": lb_bsp, "alone": alone()}

        def between() -> None:
            forget_training()
            ranks.mean(0.0)  # all have ended their turn

        records: list[Any] = []
        balance.on_round(records.append)
        took = in_turns(schemes, cycles, TURN, between, lambda: ranks.rank or print(TICK, flush=True))
        described = slowness.describe()
        model = network(name)[0]
        mine = DataLoader(data, balance.batch_size, shuffle=True, drop_last=True)
        by_itself = steps(endless(mine, lambda epoch: None), model, demo_rank.sgd(model))
        alone_s = [seconds_alone(ranks, turn, by_itself) for turn in range(ranks.size)]
    own: list[float] = []
    if records:  # on rank 0
        compute_s, input_s, samples = (
            np.array([r[key] for r in records]) for key in ("compute_s", "input_s", "samples")
        )
        own = list(np.median((compute_s + input_s) / samples, axis=0) * balance.plan / alone_s)
    return {
        "rates": {scheme: [of_turn[scheme] / each for each in seconds] for scheme, seconds in took.items()},
        "by hand": list(oracle.plan), "lb-bsp": list(balance.plan), "own": own, "slowness": described,
    }  # fmt: skip


def seconds_alone(ranks: Ranks, turn: int, steps: Iterator[None]) -> float:
    """Return the seconds of a step on one rank, while the others rest."""
    took = [0.0]
    if ranks.rank == turn:
        for _ in range(2 + 9):
            began = time.perf_counter()
            next(steps)
            took.append(time.perf_counter() - began)
    return ranks.mean(statistics.median(took[-9:])) * ranks.size


def rank_main(reducer: str, group: str, what: str, times: int) -> None:
    ranks = Ranks(reducer)
    report(equal(ranks, int(what), times) if group == "equal" else unequal(ranks, what, GROUPS[group], times))
    if reducer != "Horovod":
        dist.destroy_process_group()


def equal_row(reducer: str, what: str, reports: list[Any], pairs: int) -> tuple[str, bool]:
    """Return a row of the table of equal ranks, and whether the target is met."""
    found = []
    for kind in KINDS:
        ratios = [ratio for rank in reports for ratio in rank[kind]]
        found.append((statistics.median(ratios), error_of_median(ratios, pairs)))  # ranks wait for each other
    step_s = statistics.median(s for rank in reports for s in rank[STOCK_S])
    target = SHORT_TARGET if step_s < SHORT_S else TARGET
    said = judged(found, target, 0.005)
    cells = " | ".join(f"{median:.3f} | {error:.3f}" for median, error in found)
    return (
        f"| {reducer} | {1e3 * step_s:.0f} ms | {reports[0]['batch']} | {pairs} | {cells} | {target:.2f} | {said} |",
        said == "met",
    )


def unequal_row(reducer: str, what: str, reports: list[Any], cycles: int) -> tuple[str, bool]:
    """Return a row of a table of unequal ranks, and whether the target is met."""
    rates = reports[0]["rates"]

    def over(one: str, other: str) -> tuple[float, float]:
        ratios = [a / b for a, b in zip(rates[one], rates[other], strict=True)]
        return statistics.median(ratios), error_of_median(ratios, cycles)

    pairs = [("lb-bsp", other) for other in ("stock", "by hand", "alone")] + [("stock", "alone")]
    cells = " | ".join("{:.3f} | {:.3f}".format(*over(*pair)) for pair in pairs)
    splits = " | ".join(" : ".join(map(str, reports[0][scheme])) for scheme in ("by hand", "lb-bsp"))
    own = reports[0]["own"]
    met = over("lb-bsp", "by hand")[0] >= HALF_TARGET and max(abs(each - 1) for each in own) <= OWN_TARGET
    cells += f" | {', '.join(f'{each:.3f}' for each in own)}"
    return f"| {reducer} | {what} | {cycles} | {cells} | {splits} | {'met' if met else '**missed**'} |", met


def heads(group: str) -> list[str]:
    """Return the first lines of a group's table."""
    if group == "equal":
        names = ["reducer", "a step alone", "samples", "pairs", "BSP", "error", "LB-BSP", "error", "at most", ""]
    else:
        names = ["reducer", "network", "turns", "over the reducer", "error", "over the split by hand", "error"]
        names += ["over the fast rank alone", "error", "the reducer over the fast rank alone", "error"]
        names += ["each rank's own time", "split by hand", "LB-BSP's last"]
        names += [f"at least {HALF_TARGET} of the split by hand, own times within {OWN_TARGET:.0%}"]
    return [TITLES[group], "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="some of the groups")
    parser.add_argument("--reducers", nargs="+", choices=REDUCERS, default=list(REDUCERS))
    parser.add_argument("--pairs", type=int, default=16, help="blocks of each kind on equal ranks (default 16)")
    parser.add_argument("--cycles", type=int, default=7, help="turns of each scheme on unequal ranks (default 7)")
    parser.add_argument("--write", action="store_true", help="store a table of each group in benchmarks/results")
    options = parser.parse_args()
    if min(options.pairs, options.cycles) < 2:
        parser.error("--pairs and --cycles must be at least 2: fewer ratios have no quartiles")
    env = KEEP_MEMORY | {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "examples")}
    met = True
    with Progress() as progress:
        for group in options.only:
            reducers = [each for each in options.reducers if group == "equal" or each != "Horovod"]
            whats = STEPS_MS if group == "equal" else ("convolutional", "transformer")
            times = options.pairs if group == "equal" else options.cycles
            task = progress.add_task(group, total=len(reducers) * len(whats) * times)
            rows, notes, ranks = heads(group), [], len(GROUPS[group])
            for reducer in reducers:
                for what in whats:
                    reports = launch(
                        __file__, ranks, [reducer, group, what, times], timeout_s=300, env=env,
                        starter=[] if reducer == "Horovod" else torchrun(ranks),
                        on_line=lambda rank, line, task=task: progress.advance(task) if line == TICK else None,
                    ).reports  # fmt: skip
                    make = equal_row if group == "equal" else unequal_row
                    row, good = make(reducer, what, reports, times)
                    progress.console.print(row, markup=False, soft_wrap=True)
                    rows.append(row)
                    met &= good
                    notes = (
                        ["", "; ".join(each.get("slowness", "") for each in reports[1:])] if group != "equal" else []
                    )
            print("\n".join(["", *rows, *notes]))
            if options.write:
                write_result("overhead_beside" + ("" if group == "equal" else f"_{group}"), "\n".join([*rows, *notes]))
    return 0 if met else 1


if __name__ == "__main__":
    if {"RANK", "HOROVOD_RANK"} & {*os.environ}:
        rank_main(*sys.argv[1:4], int(sys.argv[4]))
    else:
        raise SystemExit(main())
