"""One rank of the test of wires between processes: each kind of call, whatever carries it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from pool import serve
from ranks import DEVICE, OVER_TORCH, hvd

from torch_hooks import DistributedOptimizer, LoadBalance, average_by_samples
from torch_hooks.wires.choice import wire_here
from torch_hooks.wires.torch_distributed import ProcessGroupWire


def kind() -> str:
    return type(wire_here()).__name__


def sums() -> dict[str, Any]:
    """In place, of every type that a gradient or a table may have; no version is raised."""
    wire, outcome = wire_here(), {}
    types = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
    for dtype in (*types, torch.bfloat16) if OVER_TORCH else types:
        tensor = torch.full((3, 2), 1 + wire.rank).to(dtype)
        same = wire.result(wire.start_sum(tensor, f"sum of {dtype}")) is tensor
        outcome[str(dtype)] = [same, tensor._version, *tensor.flatten().tolist()]
    return outcome


def gathers() -> list[Any]:
    """Under one name: more rows, fewer, none on some ranks, none at all, and more again than ever."""
    wire, outcome = wire_here(), []
    for n in (1, 5, 2, 0, 40):
        rows = torch.arange(n * wire.rank * 2).reshape(n * wire.rank, 2) + 1000 * wire.rank
        found = wire.wait(wire.start_gather(rows, "rows"))
        outcome.append([list(found.shape), int(found.sum())])
    return outcome


def gathers_of_all_types() -> list[Any]:
    wire = wire_here()
    rows = [torch.full((1 + wire.rank,), wire.rank), torch.full((1, 2, 2), 0.5, dtype=torch.float16)]
    handles = [wire.start_gather(each, f"of type {n}") for n, each in enumerate(rows)]
    return [wire.result(handle).tolist() for handle in reversed(handles)]


def exchanges() -> list[Any]:
    """Rank 0 with each other one, which keep some for themselves; by turns in float32 and float64."""
    wire = wire_here()
    splits = [2] * wire.size if wire.rank == 0 else [2, *(3 * (r == wire.rank) for r in range(1, wire.size))]
    outcome = []
    for dtype in (torch.float32, torch.float64):
        numbers = torch.arange(sum(splits)).to(dtype) + 100 * wire.rank
        received, counts = wire.result(wire.start_exchange(numbers, splits, "exchange"))
        outcome.append([received.tolist(), counts.tolist()])
    return outcome


def broadcasts() -> list[Any]:
    wire = wire_here()
    tensors = [torch.full((3,), wire.rank + 1.0), torch.tensor(wire.rank), torch.zeros(0)]
    for n, handle in enumerate([wire.start_broadcast(t, f"broadcast {n}") for n, t in enumerate(tensors)]):
        wire.result(handle)
        tensors[n] = tensors[n].tolist()
    obj = wire.broadcast_object({"of": wire.rank}, root_rank=1, name="object")
    return [*tensors, obj, list(wire.allgather_object(wire.rank, name="objects"))]


def objects() -> list[Any]:
    """Of each rank for all, under a default device that no object may come to, and where nothing is trained."""
    wire = wire_here()
    torch.set_default_device("meta")
    try:
        with torch.inference_mode():
            of_each = [wire.broadcast_object({"of": wire.rank}, root, f"object of {root}") for root in range(wire.size)]
            return [of_each, list(wire.allgather_object("x" * 100 * wire.rank, name="words"))]
    finally:
        torch.set_default_device(DEVICE)


def lines() -> dict[str, Any]:
    """Calls of a line come before or behind those of the wire itself, as it happens on each rank."""
    wire = wire_here()
    line = wire.new_group()
    sums = {}
    for round in range(3):
        calls = [(line, name, 10.0**n) for n, name in enumerate(["a", "b", "c", "d"])]
        calls.insert((round + 2 * wire.rank) % 5, (wire, "table", 7.0))
        handles = {name: (on, on.start_sum(torch.tensor(x), name)) for on, name, x in calls}
        sums[round] = {name: float(on.result(handle)) for name, (on, handle) in sorted(handles.items())}
    return sums


def lines_are_used_again() -> list[int]:
    """Groups of one optimizer after the other, though ranks let go of them at different times."""
    wire, kept = wire_here(), []
    before = len(getattr(wire, "_tracks", ()))
    for job in range(6):
        model = torch.nn.Linear(2, 1)
        balance = LoadBalance("bsp", global_batch=wire.size)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance)
        for _ in range(2):
            balance.batch(1)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        balance.close()
        if job == 2 and wire.rank == 1:
            kept.append((balance, optimizer))
        gone = weakref.ref(optimizer)
        del model, balance, optimizer
        gc.collect()
    assert gone() is None
    return [before, len(getattr(wire, "_tracks", ())), len(kept)]


def a_group_of_some() -> list[float]:
    """Ranks 0 and 2 train; rank 1 makes no call."""
    group = torch.distributed.new_group([0, 2])
    if hvd.rank() == 1:
        return []
    balance = LoadBalance("bsp", global_batch=2, wire=ProcessGroupWire(group))
    model = torch.nn.Linear(1, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), balance)
    with torch.no_grad():
        model.weight.zero_()
    for _ in range(2):
        balance.batch(1)
        optimizer.zero_grad()
        model(torch.tensor([[float(hvd.rank())]])).sum().backward()
        optimizer.step()
    return [model.weight.item(), average_by_samples(float(hvd.rank()), 1, balance)]


def parameters_in_bfloat16() -> list[Any]:
    """A weight and a bias that start apart; the mean gradient is the input's mean, and 1."""
    wire = wire_here()
    balance = LoadBalance("bsp", global_batch=wire.size)
    model = torch.nn.Linear(1, 1).bfloat16()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), balance, model.named_parameters())
    before = [p.item() for p in model.parameters()]
    balance.batch(1)
    model(torch.full((1, 1), float(wire.rank)).bfloat16()).sum().backward()
    optimizer.step()
    gradients = [p.grad.item() for p in model.parameters()]
    return [before, gradients]


CASES = [
    kind, sums, gathers, gathers_of_all_types, exchanges, broadcasts, objects, lines,
    lines_are_used_again, a_group_of_some, parameters_in_bfloat16,
]  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(hvd, {case.__name__: case for case in CASES})
