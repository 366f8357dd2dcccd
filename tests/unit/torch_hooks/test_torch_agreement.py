"""Parameters that no rank sums stop all ranks (here: threads)."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from hvd_hetero.testing import ThreadRankError, run_on_threads  # noqa: E402
from torch_hooks import DistributedOptimizer, LoadBalance  # noqa: E402

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once
BATCH = 8
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
Y = torch.sin(X.sum(1, keepdim=True))


def network():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss(model):
    return functional.mse_loss(model(X), Y)


def steps(rank, model, rounds, *, disturb=lambda *_: None, **options):
    """Rounds of one batch; ``disturb(rank, round, model, optimizer)`` before each. Returns the rounds done."""
    balance = LoadBalance("bsp", global_batch=BATCH, **options)
    wrapped = DistributedOptimizer(inner := sgd(model), balance, model.named_parameters())
    for number in range(rounds):
        disturb(rank, number, model, inner)
        balance.batch(4)
        wrapped.zero_grad()
        loss(model).backward()
        wrapped.step()
    return balance.rounds


def more(model, inner):
    inner.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


def swapped(model, inner):
    model[0].bias = torch.nn.Parameter(model[0].bias.detach().clone())
    inner.param_groups[0]["params"][1] = model[0].bias


@pytest.mark.parametrize("change", [more, swapped])
def test_parameters_that_the_plain_optimizer_was_given_later_are_refused_before_they_are_updated(change):
    apart = []

    def disturb(rank, round, model, inner):
        if round == 3:
            change(model, inner)
            apart.append((inner.param_groups[-1]["params"][-1 if change is more else 1],))
            apart[-1] += (apart[-1][0].detach().clone(),)

    start = network()
    with pytest.raises(ThreadRankError, match=r"holds a parameter of shape .* that no rank sums.* add_param_group\(\)"):
        run_on_threads(lambda rank: steps(rank, copy.deepcopy(start), 6, disturb=disturb), ranks=2)
    assert apart
    assert all(torch.equal(now.detach(), before) for now, before in apart)
