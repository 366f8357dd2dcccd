"""Ranks that run out of memory beside DDP, FSDP2 or Horovod's own optimizer; with an argument, one that ends them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import psutil
import torch
from pool import serve
from ranks import OVER_TORCH, hvd
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hvd_hetero import late_tables
from hvd_hetero.policies import StaticAllocation
from hvd_hetero.session import balancer_of
from hvd_hetero.testing import report
from torch_hooks import BalancedLoader, LoadBalance

SAMPLES, BATCH, FITS, ROUNDS, AT = 48, 12, 4, 9, 3


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        if ctx.fails:
            raise torch.OutOfMemoryError("CUDA out of memory (a test)")
        return gradient, None


class Net(torch.nn.Module):
    """Holds few samples on rank 0, from some round on; has buffers, which DDP sends with each forward pass."""

    def __init__(self, place: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = torch.nn.Linear(3, 4).double(), torch.nn.Linear(4, 1).double()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.balance: LoadBalance | None = None
        self.place, self.failed = place, 0
        self.until_again: int | None = None
        """Forward passes until one whose backward pass fails, though it holds few samples; None: not decided."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fails = self.balance is not None and hvd.rank() == 0 and len(x) > FITS and self.balance.rounds >= AT
        hidden = torch.tanh(self.first(x))
        self.failed += fails
        if self.place == "again" and fails and self.until_again is None:
            self.until_again = 3  # the last of three parts, whose micro-batch is not the last of the round
        elif self.until_again and not fails:
            self.until_again -= 1
            fails = self.until_again == 0
            self.failed += fails
        if self.place == "loss":  # after this pass
            fails = False
        elif fails and (self.place == "forward" or (self.place != "backward" and self.balance.round_complete)):
            raise torch.OutOfMemoryError("CUDA out of memory (a test)")
        self.seen += 1.0
        return self.last(Fails.apply(hidden, fails))


X = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def loss_of(model: Any, index: torch.Tensor) -> torch.Tensor:
    return (model(X[index]).squeeze(1) - X[index].sum(1)).square().mean()


class Indices(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> int:
        return i


def train(
    how: str, place: str = "forward", k: int = 1, guarded: bool = True, clears: str = "after", twice: bool = False,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """A loop as people have it; on rank 0 batches fail that hold more than ``FITS`` samples."""
    late_tables._SUM_CPU_S = 0.0
    net = Net(place)
    model: Any = net
    if how == "ddp":
        model = DistributedDataParallel(net, **options)
    elif how == "fsdp":
        fully_shard([net.first])
        model = fully_shard(net)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    if how == "horovod":
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=k
        )
    balance = LoadBalance(StaticAllocation([1, 1]), global_batch=BATCH * k)
    net.balance = balance
    loader = BalancedLoader(Indices(), balance, micro_batches=k, stop_at=ROUNDS)
    done: dict[int, list[int]] = {}
    begun: set[int] = set()

    def body(index: torch.Tensor) -> None:
        number, failed = balance.rounds, net.failed
        if clears == "before" and number not in begun:
            begun.add(number)
            optimizer.zero_grad()
        with nullcontext() if how == "horovod" else balance.accumulate(model):
            loss = loss_of(model, index)
            if twice:  # past DDP, as for a penalty
                loss = (loss + loss_of(model.module, index)) / 2
            if place == "loss" and net.failed > failed:
                raise torch.OutOfMemoryError("CUDA out of memory (a test)")
            loss = balance.scale(loss)
            if net.failed == failed:
                done.setdefault(number, []).extend(index.tolist())
            loss.backward()
        if balance.round_complete:
            optimizer.step()
            if clears != "before":
                model.zero_grad(set_to_none=clears == "after")

    while balance.rounds < ROUNDS:
        for index in loader:
            if guarded:
                with balance.surviving_out_of_memory():
                    body(index)
            else:
                body(index)
    balance.close()
    given = hvd.allgather_object(done, name="done")
    rounds = [[i for rank in given for i in rank[number]] for number in range(ROUNDS)]
    expected = Net()
    reference = torch.optim.AdamW(expected.parameters(), lr=0.05)
    for indices in rounds:
        reference.zero_grad()
        loss_of(expected, torch.tensor(indices)).backward()
        reference.step()
    pairs = zip(net.parameters(), expected.parameters(), strict=True)
    return {
        "difference": max(float((ours - theirs).abs().max()) for ours, theirs in pairs),
        "failed": net.failed,
        "sizes": sorted(map(len, rounds)),
        "limit": balancer_of(balance).meter.limit,
    }


def cases() -> dict[str, Callable[[], Any]]:
    if not OVER_TORCH:
        return {
            "one": lambda: train("horovod"),
            "cleared to zeros": lambda: train("horovod", clears="to zeros"),
            "in the loss": lambda: train("horovod", place="loss"),
            "k = 2": lambda: train("horovod", k=2, place="either"),
            "k = 2, cleared before": lambda: train("horovod", k=2, place="either", clears="before"),
            "k = 2, twice": lambda: train("horovod", k=2, place="again"),
        }
    return {
        "one": lambda: train("ddp"),
        "also past DDP": lambda: train("ddp", twice=True),
        "views": lambda: train("ddp", gradient_as_bucket_view=True),
        "in the loss": lambda: train("ddp", place="loss"),
        "in the loss, unused": lambda: train("ddp", place="loss", find_unused_parameters=True),
        "in the loss, k = 2": lambda: train("ddp", k=2, place="loss"),
        "k = 2": lambda: train("ddp", k=2, place="either"),
        "k = 2, views": lambda: train("ddp", k=2, place="either", gradient_as_bucket_view=True),
        "k = 2, twice": lambda: train("ddp", k=2, place="again"),
    }


def end(how: str, place: str, guarded: bool) -> None:
    """Run out of memory where nobody can do it again, and stay to see whether the others end."""
    hvd.init()
    others = [pid for pid in hvd.allgather_object(os.getpid(), name="pids") if pid != os.getpid()]
    try:
        train(how, place, guarded=guarded)
    except Exception:
        if hvd.rank() or not guarded:
            raise
        began_at = time.monotonic()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher ends this rank as soon as another has ended
        while any(psutil.pid_exists(p) and psutil.Process(p).status() != "zombie" for p in others):
            time.sleep(0.1)
        report(time.monotonic() - began_at)
        raise


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:
        end(sys.argv[1], sys.argv[2], sys.argv[3] == "guarded")
    else:
        serve(hvd, cases())
