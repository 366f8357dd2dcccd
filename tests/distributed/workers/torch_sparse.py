"""One rank of the test of sparse gradients: embeddings under every policy, against one process on the same samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from every_round import EveryRoundAnother
from pool import serve
from ranks import hvd
from torch.nn import functional
from torch.utils.data import TensorDataset

from hvd_hetero.errors import HeteroError
from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, NonBlocking, Policy, SelfAdaptive, StaticAllocation
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance
from torch_hooks.gradients import bundles

# Of small models, too, some gradients are summed where they are, and others travel together.
bundles._ALONE, bundles._MOST = 200, 100
ROUNDS = 16  # two epochs, and the beginning of a third one
GLOBAL_BATCH = 12
SAMPLES = 12 * 6 + 1
WORDS = 30
CLIP = 0.5
GENERATOR = torch.Generator(torch.get_default_device()).manual_seed(11)
TOKENS = torch.randint(0, WORDS - 4, (SAMPLES, 3), generator=GENERATOR)  # the last four words never occur
TARGETS = torch.randn(SAMPLES, 1, generator=GENERATOR, dtype=torch.float64)


class Net(torch.nn.Module):
    """Two sparse embeddings, the second of which is used for odd samples alone, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, 4, sparse=True)
        self.rare = torch.nn.Embedding(WORDS, 4, sparse=True)
        self.outer = torch.nn.Linear(4, 1)
        self.double()

    def forward(self, tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens).sum(1)
        odd = index % 2 == 1
        if odd.any():
            hidden = hidden.index_add(0, odd.nonzero()[:, 0], self.rare(tokens[odd, 0]))
        return self.outer(torch.tanh(hidden))


class OnlyWords(torch.nn.Module):
    """Nothing but sparse parameters, for the optimizer that takes no others."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.EmbeddingBag(WORDS, 1, mode="sum", sparse=True).double()

    def forward(self, tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.words(tokens)


def clip(net: torch.nn.Module) -> None:
    """By the norm of everything; PyTorch's own function refuses sparse gradients."""
    parts = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in net.parameters()]
    factor = CLIP / max(float(torch.sqrt(sum((part**2).sum() for part in parts))), 1e-30)
    if factor < 1:
        for p in net.parameters():
            p.grad.mul_(factor)


OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "sparse adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.05),
}


def train(policy: Policy, optimizer_name: str, kind: type[torch.nn.Module] = Net, **options: object) -> dict:
    torch.manual_seed(hvd.rank())
    net = kind()
    data = TensorDataset(TOKENS, TARGETS, torch.arange(SAMPLES))
    sync = options.pop("sync", "allreduce")
    balance = LoadBalance(policy, global_batch=GLOBAL_BATCH, sync=sync)
    loader = BalancedLoader(data, balance, shuffle=True, seed=2, stop_at=ROUNDS)
    optimizer = DistributedOptimizer(
        OPTIMIZERS[optimizer_name](net.parameters()), balance, net.named_parameters(), **options
    )
    optimizer.register_step_pre_hook(lambda *_: clip(net))
    seen: list[list[int]] = [[] for _ in range(ROUNDS)]
    layouts = set()
    optimizer.register_step_pre_hook(
        lambda *_: layouts.add(tuple(p.grad.is_sparse for p in net.parameters() if p.grad is not None))
    )
    while balance.rounds < ROUNDS:
        for tokens, target, index in loader:
            seen[balance.rounds] += index.tolist()
            time.sleep(2e-4 * len(index) * hvd.rank())
            optimizer.zero_grad()
            functional.mse_loss(net(tokens, index), target).backward()
            optimizer.step()
    together = hvd.allgather_object(seen)
    rounds = [[i for part in together for i in part[r]] for r in range(ROUNDS)]
    torch.manual_seed(0)
    alone = kind()
    before = functional.mse_loss(alone(TOKENS, torch.arange(SAMPLES)), TARGETS).item()
    single = OPTIMIZERS[optimizer_name](alone.parameters())
    for index in rounds if sync == "allreduce" and not policy.updates_locally else []:
        single.zero_grad()
        functional.mse_loss(alone(TOKENS[index], torch.tensor(index)), TARGETS[index]).backward()
        for p in alone.parameters():
            if p.grad is None:
                p.grad = torch.sparse_coo_tensor(
                    torch.zeros(1, 0).long(), torch.zeros(0, 4).double(), p.shape, check_invariants=True
                )
        clip(alone)
        single.step()
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])[None]
    everywhere = hvd.allgather(flat, name="everywhere")
    with torch.no_grad():
        differences = [float((p - q).abs().max()) for p, q in zip(net.parameters(), alone.parameters(), strict=True)]
    return {
        "difference": max(differences),
        "between_ranks": float((everywhere - everywhere[0]).abs().max()),
        "rounds": balance.rounds,
        "idle": hvd.allgather_object(sum(not s for s in seen)),
        "layouts": sorted(layouts),
        "loss": functional.mse_loss(net(TOKENS, torch.arange(SAMPLES)), TARGETS).item(),
        "loss before": before,
        "finite": bool(flat.isfinite().all()),
    }


def mixed_layouts_are_refused() -> str:
    """The same parameter with a sparse gradient on one rank and a dense one on the other."""
    table = torch.nn.Embedding(4, 2, sparse=hvd.rank() == 0)
    balance = LoadBalance("bsp", global_batch=hvd.size())
    optimizer = DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), balance)
    balance.batch(1)
    table(torch.tensor([1])).sum().backward()
    try:
        optimizer.step()
    except HeteroError as error:
        return str(error)
    return "nothing was refused"


def a_layout_that_changes_later_changes_nothing() -> dict:
    """Dense in the first rounds and sparse from then on, and the other way round: the result is the same."""
    results = []
    for first, then in ((False, True), (True, False), (False, False)):
        torch.manual_seed(0)
        table = torch.nn.Embedding(6, 2, sparse=first).double()
        balance = LoadBalance("bsp", global_batch=hvd.size())
        optimizer = DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), balance)
        for step in range(4):
            table.sparse = first if step < 2 else then
            balance.batch(1)
            optimizer.zero_grad()
            (table(torch.tensor([hvd.rank() + step])) ** 2).sum().backward()
            optimizer.step()
        results.append(table.weight.detach().clone())
    return {"difference": max(float((r - results[2]).abs().max()) for r in results)}


def allocated(shares: list[int], *args: Any, **options: Any) -> dict:
    return train(StaticAllocation(shares[: hvd.size()]), *args, **options)


CASES: dict[str, Callable[[], Any]] = {
    "bsp": lambda: train(BSP(), "sgd"),
    "micro-batches": lambda: train(BSP(max_micro_batch=1), "sgd"),
    "lb-bsp": lambda: train(LBBSP(), "sgd"),
    "static": lambda: allocated([3, 1, 2], "sgd"),
    "static, one rank without data": lambda: allocated([0, 3, 1], "sgd"),
    "every round another": lambda: train(EveryRoundAnother(4), "sgd"),
    "self-adaptive": lambda: train(SelfAdaptive(total=3 * hvd.size()), "sgd"),
    "non-blocking": lambda: train(NonBlocking(GLOBAL_BATCH // hvd.size()), "sgd"),
    "elastic-bsp": lambda: train(ElasticBSP(lookahead=3), "sgd"),
    "momentum": lambda: train(EveryRoundAnother(4), "momentum"),
    "adagrad": lambda: train(EveryRoundAnother(4), "adagrad"),
    "sparse adam": lambda: train(EveryRoundAnother(4), "sparse adam", OnlyWords),
    "sparse adam, as dense": lambda: train(EveryRoundAnother(4), "sparse adam", OnlyWords, sparse_as_dense=True),
    "as dense": lambda: train(EveryRoundAnother(4), "momentum", sparse_as_dense=True),
    "local": lambda: train(ElasticBSP(lookahead=3, updates="local"), "sparse adam", OnlyWords),
    "d-psgd": lambda: allocated([0, 3, 1], "sparse adam", OnlyWords, sync="d-psgd"),
    "changing": a_layout_that_changes_later_changes_nothing,
    "mixed": mixed_layouts_are_refused,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(hvd, CASES)
