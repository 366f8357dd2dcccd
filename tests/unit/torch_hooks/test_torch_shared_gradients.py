"""Gradients that share memory as a backward pass leaves them: of parts of torch.cat, or of two biases of one sample."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from hvd_hetero.policies import BSP, StaticAllocation  # noqa: E402
from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance  # noqa: E402

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once
BATCH, ROUNDS = 3, 4
X = torch.randn(BATCH * ROUNDS, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MOST = 0.05  # of the norm: every update is clipped


class Biases(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.one, self.other = (torch.nn.Parameter(torch.zeros(4, dtype=torch.float64)) for _ in range(2))

    def forward(self, x):
        return torch.tanh(x @ self.weight + self.one.view(1, -1) + self.other.view(1, -1))


class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = (torch.nn.Parameter(torch.randn(2, 4, dtype=torch.float64)) for _ in range(2))

    def forward(self, x):
        return torch.tanh(x @ torch.cat([self.one, self.other]))


def backward(model, x, passes):
    for _ in range(passes):
        functional.mse_loss(model(x), x.sin()).backward()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("policy", [BSP, lambda: StaticAllocation([1, 2])])
@pytest.mark.parametrize("kind", [Biases, Parts])
def test_gradients_that_share_memory_are_added_summed_and_clipped_as_if_they_did_not(
    kind, policy, passes, alone, monkeypatch
):
    if alone:
        monkeypatch.setattr("torch_hooks.gradients.bundles._ALONE", 8)
    torch.manual_seed(0)
    model = kind()

    def of_rank(rank):
        mine, balance = copy.deepcopy(model), LoadBalance(policy(), global_batch=BATCH)
        optimizer = DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.5), balance)
        optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(mine.parameters(), MOST) and None)
        for x in BalancedLoader(X, balance):
            backward(mine, x, passes)
            optimizer.step()
        return torch.nn.utils.parameters_to_vector(mine.parameters()).detach()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ranks = run_on_threads(of_rank, 2)
    for x in X.split(BATCH):
        optimizer.zero_grad()
        backward(model, x, passes)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)
        optimizer.step()
    for rank in ranks:
        torch.testing.assert_close(rank, torch.nn.utils.parameters_to_vector(model.parameters()), rtol=0, atol=1e-12)
