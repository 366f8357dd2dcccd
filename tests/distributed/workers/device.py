"""One rank of the device test: ranks play devices of unequal curves, and memory runs short at every possible moment.

Every sample is its own index, so what was visited is written down from the batches themselves. The oracle is plain
PyTorch on the union of what the ranks have seen, round by round.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import horovod.torch as hvd
import torch
from pool import serve
from simulated import SimulatedClock
from torch.nn import functional

from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, NonBlocking, Policy, StaticAllocation
from hvd_hetero.session import balancer_of
from hvd_hetero.telemetry import read_run
from tests.support.device_model import DeviceModel
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance, out_of_memory
from torch_hooks.gradients import bundles

bundles._ALONE = 300  # bytes: of a small model, too, some gradients are summed where they are
FEATURES = 6
SAMPLES = 251
ROUNDS = 9
GLOBAL_BATCH = 48
OWN = torch.OutOfMemoryError


class Indexed(torch.utils.data.Dataset):
    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> int:
        return i


class Net(torch.nn.Module):
    """Layers whose gradients arrive one after the other: the last layer's first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, 8)
        self.second = torch.nn.Linear(8, 8)
        self.third = torch.nn.Linear(8, 1)
        self.middle: Callable[[torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.middle is not None and hidden.requires_grad:
            # In the backward pass: the gradients of the layers above are there, those of the first are not.
            hidden.register_hook(self.middle)
        return self.third(torch.tanh(self.second(hidden)))


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return x, torch.sin(x.sum(1, keepdim=True))


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Shortage:
    """Memory runs short ``times`` times, at ``moment``, on rank 0, in micro-batches that ``when`` picks."""

    def __init__(self, moment: str, when: Callable[[LoadBalance, int], bool], times: int = 1) -> None:
        self.moment = moment
        self.left = times if hvd.rank() == 0 else 0
        self.breaks = False
        """whether the loop is left then"""
        self.sizes: list[int] = []
        self._when = when

    def strike_backward(self, balance: LoadBalance, size: int, gradient: torch.Tensor) -> None:
        self.strike("backward", balance, size)

    def strike(self, moment: str, balance: LoadBalance, size: int) -> None:
        if self.left and size > 1 and moment == self.moment and self._when(balance, size):
            self.left -= 1
            self.sizes.append(size)
            raise OWN(f"no memory for {size} samples")


class ShortageWhileOthersFinish(Shortage):
    """The rank is ahead of the others until its memory runs short; when it goes on they have told it to stop."""

    def strike(self, moment: str, balance: LoadBalance, size: int) -> None:
        if moment == "forward" and hvd.rank() != 0:
            time.sleep(0.05)
        try:
            super().strike(moment, balance, size)
        except OWN:
            time.sleep(0.3)
            raise


class ShortageThatEndsTheEpoch(Shortage):
    """On every rank, in the same micro-batch, and each then leaves the loop."""

    def __init__(self, moment: str, when: Callable[[LoadBalance, int], bool]) -> None:
        super().__init__(moment, when)
        self.left, self.breaks = 1, True


def train(policy: Policy, shortage: Shortage) -> dict:
    torch.manual_seed(100)
    net = Net().double()
    x, y = samples()
    balance = LoadBalance(policy, global_batch=GLOBAL_BATCH)
    loader = BalancedLoader(Indexed(), balance, shuffle=True, seed=5, stop_at=ROUNDS)
    optimizer = DistributedOptimizer(sgd(net.parameters()), balance, net.named_parameters())
    seen: list[list[int]] = [[] for _ in range(ROUNDS)]
    epochs: list[int] = []
    limits: list[list[int]] = []
    complete_when_struck: set[bool] = set()
    observer = balancer_of(balance).observer

    def observe(finished) -> None:
        epochs.append(finished.epoch)
        limits.append([int(v) for v in finished.table.column("limit")])
        if observer is not None:
            observer(finished)

    balancer_of(balance).observer = observe
    while balance.rounds < ROUNDS:
        for index in loader:
            round = balance.rounds
            with balance.surviving_out_of_memory():
                optimizer.zero_grad()
                shortage.strike("forward", balance, len(index))
                net.middle = partial(shortage.strike_backward, balance, len(index))
                loss = functional.mse_loss(net(x[index]), y[index])
                loss.backward()
                shortage.strike("after backward", balance, len(index))
                optimizer.step()
                seen[round] += index.tolist()
                continue
            complete_when_struck.add(balance.round_complete)
            if shortage.breaks:
                seen[round].clear()
                break
    balance.close()
    parts = hvd.allgather_object(seen)
    rounds = [[i for part in parts for i in part[r]] for r in range(ROUNDS)]
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    everywhere = hvd.allgather(flat[None].contiguous(), name="parameters")
    reference = Net().double()
    torch.manual_seed(100)
    reference = Net().double()
    inner = sgd(reference.parameters())
    for indices in rounds:
        inner.zero_grad()
        functional.mse_loss(reference(x[indices]), y[indices]).backward()
        inner.step()
    truth = torch.cat([p.detach().flatten() for p in reference.parameters()])
    return {
        "difference": float((flat - truth).abs().max() / truth.abs().max()),
        "between_ranks": float((everywhere - everywhere[0]).abs().max()),
        "rounds": [sorted(r) for r in rounds],
        "epochs": epochs,
        "complete when struck": hvd.broadcast_object(sorted(complete_when_struck), root_rank=0, name="complete"),
        "struck": hvd.broadcast_object(shortage.sizes, root_rank=0, name="struck"),
        "still to strike": hvd.broadcast_object(shortage.left, root_rank=0, name="still to strike"),
        "limits": limits,
    }


def later(balance: LoadBalance, size: int) -> bool:
    """Not in the first micro-batch of a round: others have been accumulated."""
    return balance.rounds >= 3 and balancer_of(balance).accumulating and not balancer_of(balance).closing


def last_of_several(balance: LoadBalance, size: int) -> bool:
    return balance.rounds >= 3 and balancer_of(balance).accumulating and balancer_of(balance).closing


def at_any(balance: LoadBalance, size: int) -> bool:
    return balance.rounds >= 3


def in_fours() -> Policy:
    return BSP(max_micro_batch=4)


SHORTAGES: dict[str, tuple[Callable[[], Policy], Callable[[], Shortage]]] = {
    "forward": (BSP, lambda: Shortage("forward", at_any)),
    "backward": (BSP, lambda: Shortage("backward", at_any)),
    "after backward": (BSP, lambda: Shortage("after backward", at_any)),
    "twice in a row": (BSP, lambda: Shortage("backward", at_any, times=2)),
    "three sizes": (BSP, lambda: Shortage("backward", lambda b, n: b.rounds >= 3 and n > 2, times=3)),
    "later micro-batch, forward": (in_fours, lambda: Shortage("forward", later)),
    "later micro-batch, backward": (in_fours, lambda: Shortage("backward", later, times=2)),
    "last micro-batch, forward": (in_fours, lambda: Shortage("forward", last_of_several, times=2)),
    "last micro-batch, backward": (in_fours, lambda: Shortage("backward", last_of_several, times=2)),
    "every micro-batch above five": (BSP, lambda: Shortage("backward", lambda b, n: n > 5, times=1000)),
    "left for good": (in_fours, lambda: ShortageThatEndsTheEpoch("forward", later)),
    "static": (lambda: StaticAllocation([3, 1, 2][: hvd.size()]), lambda: Shortage("backward", later, times=2)),
    "non-blocking": (lambda: NonBlocking(6), lambda: Shortage("backward", at_any)),
    "non-blocking, after the signal to stop": (
        lambda: NonBlocking(2, anticipates=False),
        lambda: ShortageWhileOthersFinish("backward", last_of_several),
    ),
    "elastic-bsp": (lambda: ElasticBSP(lookahead=4), lambda: Shortage("backward", at_any, times=2)),
}


def curves() -> dict:
    """LB-BSP finds the split of ranks that play unequal devices, and keeps to what fits in one of them."""
    clock = SimulatedClock()
    devices = [
        DeviceModel(*curve, error=OWN, clock=clock, sleep=clock.pass_s)
        for curve in ((1.2e-3, 12e-3, 6, 40), (4.5e-3, 9e-3, 4, None), (2.4e-3, 18e-3, 8, None))
    ][: hvd.size()]
    device = devices[hvd.rank()]
    torch.manual_seed(3)
    net = Net().double()
    x, y = samples()
    path = Path(tempfile.mkdtemp()) / "run.jsonl"
    balance = LoadBalance(LBBSP(device="gpu"), global_batch=32 * hvd.size(), telemetry=path)
    loader = BalancedLoader(Indexed(15 * 32 * hvd.size()), balance, shuffle=True, seed=5, stop_at=45)
    optimizer = DistributedOptimizer(sgd(net.parameters()), balance, net.named_parameters())
    plans: list[tuple[int, ...]] = []
    observer = balancer_of(balance).observer

    def observe(finished) -> None:
        plans.append((finished.plan.total, finished.plan.samples))
        if observer is not None:
            observer(finished)

    balancer_of(balance).observer = observe
    visits: list[list[int]] = []
    while balance.rounds < 45:
        visits.append([])
        for index in loader:
            with balance.surviving_out_of_memory():
                optimizer.zero_grad()
                with device.step(len(index)):
                    loss = functional.mse_loss(net(x[index % SAMPLES]), y[index % SAMPLES])
                loss.backward()
                optimizer.step()
                visits[-1] += index.tolist()
    balance.close()
    everyone = hvd.allgather_object(visits)
    gammas = [(d.gamma.slope_s, d.gamma.intercept_s, d.gamma.saturation) for d in devices]
    result = {
        "plans": plans,
        "gammas": gammas,
        "limit": hvd.broadcast_object(balancer_of(balance).meter.limit, root_rank=0, name="limit"),
        "epochs": [sorted(i for of_rank in everyone for i in of_rank[e]) for e in range(len(visits))],
    }
    if hvd.rank() == 0:
        run = read_run(path)
        result["telemetry"] = {
            "limit": run.limit[-1].tolist(),
            "slope_s": run.slope_s[-1].tolist(),
            "intercept_s": run.intercept_s[-1].tolist(),
            "saturation": run.saturation[-1].tolist(),
            "headroom": json.loads(path.read_text().splitlines()[0])["headroom"],
        }
        path.unlink()
        path.parent.rmdir()
    return result


def raise_out_of_memory(*_) -> None:
    raise OWN("no memory")


def fatal() -> list[str]:
    """What cannot be done again says so; on all ranks at once, so that nobody waits."""
    messages = []
    x, y = samples()
    for moment in ("own batch", "update", "cleared", "another error"):
        net = Net().double()
        balance = LoadBalance(BSP(), global_batch=8 * hvd.size())
        optimizer = DistributedOptimizer(sgd(net.parameters()), balance, net.named_parameters())
        try:
            if moment == "own batch":
                balance.batch(8)
                with balance.surviving_out_of_memory():
                    raise OWN("no memory")
            shortage = ShortageThatEndsTheEpoch("backward", lambda balance, size: balance.rounds == 2)
            loader = BalancedLoader(Indexed(), balance, stop_at=3 if moment == "cleared" else 4)
            for index in loader:
                if moment == "update" and balance.rounds == 2:
                    optimizer.register_step_pre_hook(raise_out_of_memory)
                with balance.surviving_out_of_memory():
                    if moment == "cleared":
                        net.middle = partial(shortage.strike_backward, balance, len(index))
                    if moment == "another error":
                        raise RuntimeError("shapes cannot be multiplied")
                    functional.mse_loss(net(x[index]), y[index]).backward()
                    optimizer.step()
                    net.zero_grad()  # in the middle of the round, where a batch is done in parts
                    continue
        except Exception as error:  # noqa: BLE001 - its message is what is looked at
            messages.append(f"{type(error).__name__}: {error}")
        optimizer.close()
    return messages


def unprotected() -> None:
    """A loop that nothing would save, and that ends in the middle of a micro-batch, as when memory runs short there."""
    x, y = samples()
    net = Net().double()
    balance = LoadBalance(LBBSP(device="gpu"), global_batch=8 * hvd.size())
    optimizer = DistributedOptimizer(sgd(net.parameters()), balance, net.named_parameters())

    def loop() -> None:
        for index in BalancedLoader(Indexed(), balance):
            functional.mse_loss(net(x[index]), y[index])
            if balance.rounds == 4:
                out_of_memory._failures = lambda: 1  # what the device's allocator would have counted
                raise OWN("no memory")
            optimizer.zero_grad()
            functional.mse_loss(net(x[index]), y[index]).backward()
            optimizer.step()

    before = out_of_memory._failures
    try:
        loop()
    except OWN:
        pass
    finally:
        out_of_memory._failures = before
    optimizer.close()


class Heard(logging.Handler):
    """What is said while it listens."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("torch_hooks").addHandler(self)
        return self.said

    def __exit__(self, *_: object) -> None:
        logging.getLogger("torch_hooks").removeHandler(self)


def short_of_memory(name: str) -> dict:
    policy, shortage = SHORTAGES[name]
    with Heard() as said:
        outcome = train(policy(), shortage())
    return outcome | {"samples": SAMPLES, "warned": sum("ran out of memory with" in each for each in said)}


def what_an_unprotected_loop_is_told() -> list[str]:
    with Heard() as said:
        unprotected()
    return said


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(
        hvd,
        {name: partial(short_of_memory, name) for name in SHORTAGES}
        | {
            "unprotected": what_an_unprotected_loop_is_told,
            "fatal": fatal,
            "curves": curves,
        },
    )
