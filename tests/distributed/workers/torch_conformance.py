"""One rank of the conformance test: what Horovod promises of its PyTorch optimizer, asked of this one.

Each scenario asks for one behaviour that the tests of Horovod's own optimizer ask for, by the means of this package:
batches are announced, weights come from their samples, and a round takes the place of ``backward_passes_per_step``.
"""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import sys
import time
from typing import Any

import torch
from pool import serve
from ranks import hvd
from torch.nn import functional
from torch_common import refusal

from hvd_hetero.policies import BSP
from hvd_hetero.testing import report
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance
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


def state_is_broadcast_for_every_optimizer() -> dict:
    """Rank 0 resumes from a checkpoint, the others are fresh: parameters, state and options become rank 0's."""
    outcome = {}
    for kind in OPTIMIZERS:
        model = model_for(kind)
        optimizer, balance = wrap(kind(model.parameters(), **accepted(kind, OPTIONS)), model.named_parameters())
        steps(model, optimizer, balance)
        saved = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        before = [p.detach().clone() for p in model.parameters()] + copy.deepcopy(state_of(optimizer))
        optimizer.close()

        model = model_for(kind)
        fresh = kind(model.parameters(), **accepted(kind, OPTIONS))
        if hvd.rank() == 0:
            saved.seek(0)
            checkpoint = torch.load(saved)
            model.load_state_dict(checkpoint["model"])
            fresh.load_state_dict(checkpoint["optimizer"])
        optimizer, balance = wrap(fresh, model.named_parameters())
        after = [*model.parameters(), *state_of(optimizer)]
        lost = max((float((a - b).abs().max()) for a, b in zip(before, after, strict=True)), default=0.0)
        steps(model, optimizer, balance, begin=2)
        outcome[kind.__name__] = {
            "lost": lost,
            "entries": len(state_of(optimizer)),
            "parameters apart": apart(model.parameters()),
            "state apart": apart(state_of(optimizer)),
        }
    return outcome


def horovods_broadcasts_work_after_wrapping() -> dict:
    """In the order of Horovod's examples: wrap, load on rank 0 alone, broadcast. And with nothing to load."""
    outcome = {}
    for kind in OPTIMIZERS:
        hooked = []

        def wrapped(seed: int, kind: Any = kind, hooked: list[int] = hooked) -> tuple[Any, DistributedOptimizer, Any]:
            model = model_for(kind)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(seed)
            optimizer, balance = wrap(kind(model.parameters(), **accepted(kind, OPTIONS)), model.named_parameters())
            optimizer.register_step_post_hook(lambda *_: hooked.append(1))
            return model, optimizer, balance

        model, optimizer, balance = wrapped(0)
        steps(model, optimizer, balance)
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        before = [*saved["model"].values(), *copy.deepcopy(state_of(optimizer))]

        model, optimizer, balance = wrapped(1)
        hooked.clear()
        if hvd.rank() == 0:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        after = [*model.parameters(), *state_of(optimizer)]
        lost = max((float((a - b).abs().max()) for a, b in zip(before, after, strict=True)), default=0.0)
        hooks = len(hooked)
        steps(model, optimizer, balance, begin=2)
        outcome[kind.__name__] = {
            "lost": lost, "hooks": hooks, "apart": apart([*model.parameters(), *state_of(optimizer)]),
        }  # fmt: skip

        ends = []
        for broadcasts in (False, True):
            model, optimizer, balance = wrapped(0)
            if broadcasts:
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            steps(model, optimizer, balance)
            ends.append([p.detach().clone() for p in [*model.parameters(), *state_of(optimizer)]])
        fresh = zip(*ends, strict=True)
        outcome[kind.__name__]["with nothing to load"] = max(float((a - b).abs().max()) for a, b in fresh)
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


def parameters_without_gradients_are_broadcast() -> dict:
    """Whole numbers that select, and are not trained."""

    class Selects(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.which = torch.nn.Parameter(torch.tensor([1, 3]) - hvd.rank() % 2, requires_grad=False)
            self.values = torch.nn.Parameter(torch.rand(4))

    torch.manual_seed(hvd.rank())
    model = Selects()
    optimizer, balance = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    balance.batch(1)
    (model.values[model.which] * 2).sum().backward()
    optimizer.step()
    return {"which": model.which.tolist(), "dtype": str(model.which.dtype), "apart": apart(model.parameters())}


def state_with_several_optimizers() -> dict:
    """Two networks, each with an optimizer and balance of its own, resumed on rank 0 alone."""
    pairs = []
    for kind, seed in ((torch.optim.Adam, 1), (torch.optim.SGD, 2)):
        model = network(seed + 10 * hvd.rank())
        plain = kind(model.parameters(), **accepted(kind, OPTIONS))
        if hvd.rank() == 0:
            functional.mse_loss(model(batch()[0]), batch()[1]).backward()
            plain.step()
        pairs.append((model, *wrap(plain, model.named_parameters())))
    for step in range(3):
        for model, optimizer, balance in pairs:
            steps(model, optimizer, balance, 1, step)
    return {
        "parameters apart": max(apart(model.parameters()) for model, _, _ in pairs),
        "state apart": max(apart(state_of(optimizer)) for _, optimizer, _ in pairs),
        "entries": [len(state_of(optimizer)) for _, optimizer, _ in pairs],
        "steps": float(pairs[0][1].state_dict()["state"][0]["step"]),
    }


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


def ranks_do_not_drift() -> dict:
    """Fifty steps with momentum on data of each rank's own."""
    model = network()
    optimizer, balance = wrap(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters())
    steps(model, optimizer, balance, 50)
    return {"parameters apart": apart(model.parameters()), "state apart": apart(state_of(optimizer))}


def names() -> dict:
    one, other = torch.nn.Conv2d(1, 1, 1), torch.nn.Conv2d(1, 1, 1)
    both = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    doubled = list(itertools.chain(one.named_parameters(), other.named_parameters()))
    model = network()
    half = list(model.named_parameters())[:2]
    nameless, balance = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    steps(model, nameless, balance)
    groups = network()
    grouped, balance = wrap(
        torch.optim.SGD([{"params": groups[0].parameters()}, {"params": groups[2].parameters(), "lr": 0.01}], lr=0.1)
    )
    steps(groups, grouped, balance)
    own = sorted(grouped._names.values())
    return {
        "duplicate": refusal(lambda: wrap(both, doubled)),
        "missing": refusal(lambda: wrap(torch.optim.SGD(network().parameters(), lr=0.1), half)),
        "not pairs": refusal(lambda: wrap(both, list(one.parameters()))),
        "nameless apart": apart(model.parameters()),
        "unique": len(set(own)) == len(own) == 4,
        "same everywhere": all(theirs == own for theirs in hvd.allgather_object(own)),
        "groups apart": apart(groups.parameters()),
        "rates": [group["lr"] for group in grouped.param_groups],
    }


def gradients_are_turned_off_and_on() -> dict:
    """A generator and a discriminator are trained in turns, each frozen meanwhile."""
    torch.manual_seed(hvd.rank())
    generator, judge = torch.nn.Conv2d(1, 3, 1), torch.nn.Conv2d(3, 1, 1)
    trained = {
        net: wrap(torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters()) for net in (generator, judge)
    }
    kept = True
    for turn in range(10):
        active = (generator, judge)[turn % 2]
        for net in trained:
            net.requires_grad_(net is active)
        optimizer, balance = trained[active]
        balance.batch(2)
        for each, _ in trained.values():
            each.zero_grad()
        judge(generator(torch.rand(2, 1, 5, 5))).sum().backward()
        for net in trained:
            has = [p.grad is not None and bool(p.grad.abs().max() > 0) for p in net.parameters()]
            kept &= all(has) if net is active else not any(has)
        optimizer.step()
    return {"only the active one": kept, "apart": apart([*generator.parameters(), *judge.parameters()])}


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


def a_step_after_synchronize_does_not_synchronise_twice() -> dict:
    """Horovod warns, and reduces what is reduced already; here the sums are used as they are."""
    model, twin = network(3), network(3)
    for net, explicit in ((model, True), (twin, False)):
        optimizer, balance = wrap(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        x, y = batch()
        balance.batch(len(x))
        functional.mse_loss(net(x), y).backward()
        if explicit:
            optimizer.synchronize()
        optimizer.step()
    difference = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    return {"difference": difference}


def several_backward_passes_per_step() -> dict:
    """The counterpart of ``backward_passes_per_step``: micro-batches of a round, one update of one process's size."""
    size = SAMPLES * hvd.size()
    generator = torch.Generator(torch.get_default_device()).manual_seed(9)
    x, y = torch.randn(size, INPUTS, generator=generator), torch.randn(size, OUTPUTS, generator=generator)
    model, alone = network(4).double(), network(4).double()
    optimizer, balance = wrap(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), BSP(max_micro_batch=5)
    )
    single = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    calls = 0
    for _ in range(3):
        for xs, ys in BalancedLoader(torch.utils.data.TensorDataset(x.double(), y.double()), balance):
            calls += 1
            optimizer.zero_grad()
            functional.mse_loss(model(xs), ys).backward()
            optimizer.step()
        single.zero_grad()
        functional.mse_loss(alone(x.double()), y.double()).backward()
        single.step()
    difference = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    return {"difference": difference, "calls": calls, "rounds": balance.rounds}


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


def compression() -> dict:
    """What Horovod compresses and gives back, in every floating-point type; whole numbers are left alone."""
    outcome = {}
    for dtype in (torch.float32, torch.float64):
        model = network(5).to(dtype)
        optimizer, balance = wrap(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=hvd.Compression.fp16
        )
        x, y = (t.to(dtype) for t in batch())
        balance.batch(len(x))
        functional.mse_loss(model(x), y).backward()
        optimizer.synchronize()
        exact = network(5).to(dtype)
        functional.mse_loss(exact(x), y).backward()
        means = [hvd.allreduce(p.grad, name=f"exact.{i}", op=hvd.Average) for i, p in enumerate(exact.parameters())]
        off = max(float((p.grad - m).abs().max()) for p, m in zip(model.parameters(), means, strict=True))
        outcome[str(dtype)] = {"dtype": str(model[0].weight.grad.dtype), "off": off}
    return outcome


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


def zero_grad_in_both_ways() -> dict:
    outcome = {}
    for to_none in (True, False):
        model = network(8)
        optimizer, balance = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), policy=BSP())
        for step in range(3):
            x, y = batch(step)
            balance.batch(len(x))
            optimizer.zero_grad(set_to_none=to_none)
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        left = [p.grad for p in model.parameters()]
        outcome[str(to_none)] = {
            "left": [None if g is None else float(g.abs().max()) for g in left],
            "end": [float(v) for v in model[2].bias.detach()],
        }
    return outcome


def one_rank_leaves() -> None:
    """The last rank ends in the middle of training, with a code of its own."""
    model = network()
    optimizer, balance = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    steps(model, optimizer, balance, 3)
    report(balance.rounds)
    if hvd.rank() == hvd.size() - 1:
        sys.exit(7)
    try:
        steps(model, optimizer, balance, 1000, 3)
        report("it went on alone")
    except wire_here().failure:
        time.sleep(30)  # the other rank is to be the first that ends; horovodrun then ends this one
        raise


def optimizers() -> list[str]:
    return [optimizer.__name__ for optimizer in OPTIMIZERS]


CASES = [
    optimizers, state_is_broadcast_for_every_optimizer, horovods_broadcasts_work_after_wrapping,
    options_are_broadcast_for_every_optimizer, parameters_without_gradients_are_broadcast,
    state_with_several_optimizers, gradients_are_exchanged_though_ranks_use_other_layers, ranks_do_not_drift, names,
    gradients_are_turned_off_and_on, clipping, a_step_after_synchronize_does_not_synchronise_twice,
    several_backward_passes_per_step, the_mean_does_not_overflow, compression, sparse_embeddings,
    uneven_data_needs_no_join, zero_grad_in_both_ways,
]  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "leave" in sys.argv:
        hvd.init()
        one_rank_leaves()
    else:
        serve(hvd, {case.__name__: case for case in CASES})
