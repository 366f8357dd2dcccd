"""Loops as users write them, on ranks that are threads, and what each rank is told: for tests of all around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

from hvd_hetero.errors import HeteroError
from hvd_hetero.testing import run_on_threads
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once
SAMPLES, FEATURES = 26, 4
X = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
Y = torch.sin(X.sum(1, keepdim=True))
DATA = TensorDataset(X, Y)


def linear() -> torch.nn.Module:
    """Return the same model whenever it is asked for."""
    model = torch.nn.Linear(FEATURES, 1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    return model


def flat(model: torch.nn.Module) -> torch.Tensor:
    """Return all parameters, end to end."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Job:
    """One rank's training; ``options`` are the loader's. ``prepare`` makes the model of one and of the balance."""

    def __init__(
        self,
        policy: Any = "bsp",
        *,
        model: torch.nn.Module | None = None,
        prepare: Callable[[torch.nn.Module, LoadBalance], torch.nn.Module] = lambda model, balance: model,
        data: Any = DATA,
        batch: int = 12,
        balance: dict[str, Any] | None = None,
        wraps: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.balance = LoadBalance(policy, global_batch=batch, **(balance or {}))
        self.model = prepare(linear() if model is None else model, self.balance)
        self.loader = BalancedLoader(data, self.balance, **options)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = DistributedOptimizer(self.inner, self.balance, self.model.named_parameters(), **(wraps or {}))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean over these samples."""
        return functional.mse_loss(self.model(x), y)

    def epochs(self, count: int = 1, after: Callable[[], object] = lambda: None) -> Job:
        """Train so many epochs; ``after`` is called at the end of each body."""
        for _ in range(count):
            for x, y, *_ in self.loader:
                self.optimizer.zero_grad()
                self.loss(x, y).backward()
                self.optimizer.step()
                after()
        return self


def require_same_bits(models: list[torch.nn.Module]) -> None:
    """Require that all ranks hold the same parameters, which are numbers."""
    ranks = torch.stack([flat(model) for model in models])
    assert ranks.isfinite().all()
    assert (ranks == ranks[0]).all()


def told(case: Callable[[int], object], ranks: int = 2) -> list[str]:
    """Return what each rank is told; a rank that is told nothing, or waits, is a failure."""

    def attempt(rank: int) -> str:
        with pytest.raises((ValueError, TypeError, HeteroError)) as caught:
            case(rank)
        return f"{type(caught.value).__name__}: {caught.value}"

    return run_on_threads(attempt, ranks)
