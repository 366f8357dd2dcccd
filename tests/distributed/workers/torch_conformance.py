"""One rank of the conformance test: what Horovod promises of its PyTorch optimizer, asked of this one.

Each scenario asks for one behaviour that the tests of Horovod's own optimizer ask for, by the means of this package:
batches are announced, weights come from their samples, and a round takes the place of ``backward_passes_per_step``.
"""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import os
import time
from functools import partial
from typing import Any

import torch
from pool import serve
from ranks import hvd
from torch.nn import functional

from hvd_hetero.testing import report
from torch_hooks import DistributedOptimizer, LoadBalance
from torch_hooks.wires.choice import wire_here

INPUTS, OUTPUTS, SAMPLES = 10, 4, 12
# PyTorch's optimizers but two: LBFGS wants a closure, SparseAdam sparse gradients (asked for by themselves below).
OPTIMIZERS = sorted(
    (
        each
        for each in torch.optim.Optimizer.__subclasses__()
        if each.__module__.startswith("torch.optim") and each not in (torch.optim.LBFGS, torch.optim.SparseAdam)
    ),
    key=lambda each: each.__name__,
)
OPTIONS = {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.02, "betas": (0.8, 0.95), "etas": (0.6, 1.3), "amsgrad": True}
OTHER_OPTIONS = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.1, "betas": (0.7, 0.9), "etas": (0.5, 1.2)}


def accepted(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    names = inspect.signature(kind.__init__).parameters
    return {name: value for name, value in options.items() if name in names}


def network(seed: int | None = None) -> torch.nn.Module:
    torch.manual_seed(hvd.rank() if seed is None else seed)  # ranks start apart
    return torch.nn.Sequential(torch.nn.Linear(INPUTS, 6), torch.nn.ReLU(), torch.nn.Linear(6, OUTPUTS))


def matrices() -> torch.nn.Module:
    """For Muon, which takes nothing but matrices."""
    torch.manual_seed(hvd.rank())
    return torch.nn.Linear(INPUTS, OUTPUTS, bias=False)


def model_for(kind: type[torch.optim.Optimizer]) -> torch.nn.Module:
    return matrices() if kind.__name__ == "Muon" else network()


def batch(step: int = 0, size: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1000 * step + hvd.rank())
    return torch.randn(size, INPUTS, generator=generator), torch.randn(size, OUTPUTS, generator=generator)


def wrap(
    optimizer: torch.optim.Optimizer, named: Any = None, policy: Any = "bsp", **options: Any
) -> tuple[DistributedOptimizer, LoadBalance]:
    balance = LoadBalance(policy, global_batch=SAMPLES * hvd.size())
    return DistributedOptimizer(optimizer, balance, named, **options), balance


def steps(
    model: torch.nn.Module, optimizer: DistributedOptimizer, balance: LoadBalance, count: int = 2, begin: int = 0
) -> None:
    for step in range(begin, begin + count):
        x, y = batch(step)
        balance.batch(len(x))
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()


def apart(tensors: Any) -> float:
    """How far the ranks' numbers are from rank 0's."""
    flat = torch.cat([torch.as_tensor(t).detach().double().reshape(-1) for t in tensors])
    everywhere = hvd.allgather(flat[None], name="apart")
    return float((everywhere - everywhere[0]).abs().max()) if flat.numel() else 0.0


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = optimizer.state_dict()["state"]
    return [
        torch.as_tensor(value)
        for key in sorted(states)
        for _, value in sorted(states[key].items())
        if isinstance(value, torch.Tensor | float | int)
    ]


def reaches_fresh_optimizers(after_wrapping: bool) -> dict:
    """Rank 0 resumes from a checkpoint, the others are fresh: parameters and state become rank 0's.

    Before its optimizer is wrapped, or afterwards, in the order of Horovod's examples: wrap, load, broadcast.
    """
    outcome = {}
    for kind in OPTIMIZERS:
        model = model_for(kind)
        optimizer, balance = wrap(kind(model.parameters(), **accepted(kind, OPTIONS)), model.named_parameters())
        steps(model, optimizer, balance)
        saved = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        before = [p.detach().clone() for p in model.parameters()] + copy.deepcopy(state_of(optimizer))
        optimizer.close()

        model, hooked = model_for(kind), []
        loads = fresh = kind(model.parameters(), **accepted(kind, OPTIONS))
        if after_wrapping:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1.0)
            optimizer, balance = wrap(fresh, model.named_parameters())
            optimizer.register_step_post_hook(lambda *_, hooked=hooked: hooked.append(1))
            loads = optimizer
        if hvd.rank() == 0:
            saved.seek(0)
            checkpoint = torch.load(saved)
            model.load_state_dict(checkpoint["model"])
            loads.load_state_dict(checkpoint["optimizer"])
        if after_wrapping:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        else:
            optimizer, balance = wrap(fresh, model.named_parameters())
        after = [*model.parameters(), *state_of(optimizer)]
        lost = max((float((a - b).abs().max()) for a, b in zip(before, after, strict=True)), default=0.0)
        hooks = len(hooked)
        steps(model, optimizer, balance, begin=2)
        outcome[kind.__name__] = {
            "lost": lost, "hooks": hooks, "apart": apart([*model.parameters(), *state_of(optimizer)]),
        }  # fmt: skip
    return outcome


def broadcasts_with_nothing_to_load() -> dict:
    """Change nothing, though Horovod's makes state by a step."""
    outcome = {}
    for kind in OPTIMIZERS:
        ends = []
        for broadcasts in (False, True):
            model = model_for(kind)
            optimizer, balance = wrap(kind(model.parameters(), **accepted(kind, OPTIONS)), model.named_parameters())
            if broadcasts:
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            steps(model, optimizer, balance)
            ends.append([p.detach().clone() for p in [*model.parameters(), *state_of(optimizer)]])
        outcome[kind.__name__] = max(float((a - b).abs().max()) for a, b in zip(*ends, strict=True))
    return outcome


def options_are_broadcast_for_every_optimizer() -> dict:
    """Ranks are given other options; rank 0's hold, with their types, and a step works with them."""
    outcome = {}
    for kind in OPTIMIZERS:
        model = model_for(kind)
        mine = accepted(kind, OPTIONS if hvd.rank() == 0 else OTHER_OPTIONS | {"amsgrad": False})
        optimizer, balance = wrap(kind(model.parameters(), **mine), model.named_parameters())
        wanted = accepted(kind, OPTIONS)
        group = optimizer.param_groups[0]
        same = all(type(group[name]) is type(value) and group[name] == value for name, value in wanted.items())
        steps(model, optimizer, balance)
        outcome[kind.__name__] = {"same": same, "parameters apart": apart(model.parameters())}
    return outcome


def gradients_are_exchanged_though_ranks_use_other_layers() -> dict:
    """Of three layers rank 0 trains two and the others another two; all must get every gradient."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (torch.nn.Linear(INPUTS, INPUTS) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.relu(self.first(x))
            return self.second(hidden) if hvd.rank() == 0 else self.third(hidden)

    outcome = {}
    for kind in OPTIMIZERS:
        if kind.__name__ == "Muon":
            continue  # biases are no matrices
        torch.manual_seed(0)
        model = Net()
        start = copy.deepcopy(model)
        optimizer, balance = wrap(kind(model.parameters(), **accepted(kind, OPTIONS)), model.named_parameters())
        x = batch()[0]
        for _ in range(2):
            balance.batch(len(x))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        moved = [float((p - q).abs().max()) for p, q in zip(model.parameters(), start.parameters(), strict=True)]
        outcome[kind.__name__] = {"moved": min(moved), "apart": apart(model.parameters())}
    return outcome


def names() -> dict:
    """Those of parameters without any, of two groups, are made, alike on all ranks."""
    groups = network()
    grouped, balance = wrap(
        torch.optim.SGD([{"params": groups[0].parameters()}, {"params": groups[2].parameters(), "lr": 0.01}], lr=0.1)
    )
    steps(groups, grouped, balance)
    own = sorted(grouped._names.values())
    return {
        "unique": len(set(own)) == len(own) == 4,
        "same everywhere": all(theirs == own for theirs in hvd.allgather_object(own)),
        "apart": apart(groups.parameters()),
        "rates": [group["lr"] for group in grouped.param_groups],
    }


def clipping() -> dict:
    """Between synchronize() and step(): the gradient that is clipped is that of all ranks."""
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    optimizer, balance = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    x = torch.full((3, 1), 1.0 + hvd.rank())
    balance.batch(3)
    optimizer.zero_grad()
    functional.mse_loss(model(x), torch.zeros(3, 1)).backward()
    ready = optimizer.synchronize()
    before = model.weight.grad.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    after = model.weight.grad.item()
    with optimizer.skip_synchronize():
        optimizer.step()
    inputs = [1.0 + rank for rank in range(hvd.size())]
    return {
        "ready": ready,
        "before": before,
        "expected": sum(2 * (0.5 * x) * x for x in inputs) / len(inputs),
        "after": after,
        "moved": 0.5 - model.weight.item(),
        "again": optimizer.synchronize(),
    }


def the_mean_does_not_overflow() -> dict:
    """The counterpart of ``gradient_predivide_factor``: gradients are divided before they are summed."""
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer, balance = wrap(torch.optim.SGD(model.parameters(), lr=0.0), compression=hvd.Compression.fp16)
    balance.batch(1)
    (model(torch.ones(1, 1)) * 60000.0).sum().backward()  # the largest half is 65504: a sum of two would not do
    optimizer.synchronize()
    return {"gradient": model.weight.grad.item()}


def sparse_embeddings() -> dict:
    """Different rows on every rank, with and without ``sparse_as_dense``, against the sum of all."""
    outcome = {}
    for as_dense in (False, True):
        torch.manual_seed(6)
        table = torch.nn.Embedding(10, 3, sparse=True)
        optimizer, balance = wrap(torch.optim.SparseAdam(list(table.parameters()), lr=0.1), sparse_as_dense=as_dense)
        words = torch.tensor([[1, 2, 4, 5], [4, 3, 2, 9]] if hvd.rank() == 0 else [[1, 3, 4], [4, 7, 9]])
        balance.batch(len(words))
        table(words).sum(dim=(1, 2)).mean().backward()
        optimizer.synchronize()
        expected = torch.zeros(10, 3)
        for rank in range(hvd.size()):
            for word in itertools.chain(*([[1, 2, 4, 5], [4, 3, 2, 9]] if rank == 0 else [[1, 3, 4], [4, 7, 9]])):
                expected[word] += 1 / (2 * hvd.size())
        off = float((table.weight.grad.to_dense() - expected).abs().max())
        with optimizer.skip_synchronize():
            optimizer.step()
        outcome[str(as_dense)] = {"off": off, "apart": apart(table.parameters())}
    return outcome


def uneven_data_needs_no_join() -> dict:
    """The counterpart of ``hvd.join``: ranks with fewer batches take part with none, and weigh nothing."""
    model, alone = network(7).double(), network(7).double()
    optimizer, balance = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    single = torch.optim.SGD(alone.parameters(), lr=0.1)
    counts = [[3 * max(0, 4 - rank - step) for rank in range(hvd.size())] for step in range(4)]
    for step, here in enumerate(counts):
        generator = torch.Generator(torch.get_default_device()).manual_seed(step)
        x = torch.randn(sum(here), INPUTS, generator=generator, dtype=torch.float64)
        y = torch.randn(sum(here), OUTPUTS, generator=generator, dtype=torch.float64)
        begin = sum(here[: hvd.rank()])
        mine = slice(begin, begin + here[hvd.rank()])
        balance.batch(here[hvd.rank()])
        optimizer.zero_grad()
        functional.mse_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
        single.zero_grad()
        functional.mse_loss(alone(x), y).backward()
        single.step()
    difference = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    return {"difference": difference, "counts": counts, "apart": apart(model.parameters())}


def waiting_does_not_spin() -> dict:
    """The last rank comes late; the others wait without using their processor."""
    model = network()
    optimizer, balance = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    x, y = batch()
    balance.batch(len(x))
    functional.mse_loss(model(x), y).backward()
    if hvd.rank() == hvd.size() - 1:
        time.sleep(2.0)
    wall_s, used_s = time.perf_counter(), time.thread_time()
    optimizer.step()
    return {"wall_s": time.perf_counter() - wall_s, "used_s": time.thread_time() - used_s}


def one_rank_leaves() -> None:
    """The last rank ends in the middle of training, with a code of its own."""
    model = network()
    optimizer, balance = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    steps(model, optimizer, balance, 3)
    report(balance.rounds)
    if hvd.rank() == hvd.size() - 1:
        os._exit(7)
    try:
        steps(model, optimizer, balance, 1000, 3)
        report("it went on alone")
    except wire_here().failure:
        time.sleep(30)  # the other rank is to be the first that ends; horovodrun then ends this one
        raise


def optimizers() -> list[str]:
    return [optimizer.__name__ for optimizer in OPTIMIZERS]


CASES = [
    optimizers, broadcasts_with_nothing_to_load, options_are_broadcast_for_every_optimizer,
    gradients_are_exchanged_though_ranks_use_other_layers, names, clipping,
    the_mean_does_not_overflow, sparse_embeddings, uneven_data_needs_no_join, waiting_does_not_spin, one_rank_leaves,
]  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = {case.__name__: case for case in CASES}
    for after in (False, True):
        cases[f"state, {'after' if after else 'before'} wrapping"] = partial(reaches_fresh_optimizers, after)
    serve(hvd, cases)
