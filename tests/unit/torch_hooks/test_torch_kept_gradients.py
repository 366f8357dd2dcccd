"""Gradients of earlier rounds that are still in use: put back for other parameters, or kept by an optimizer."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from hvd_hetero.policies import BSP, StaticAllocation  # noqa: E402
from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance  # noqa: E402

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once
RANKS, BATCH, ROUNDS, LAYERS = 2, 6, 5, 6
POLICIES = {"one micro-batch": BSP, "several micro-batches": lambda: StaticAllocation([1, 2])}


def net(width):
    """Parameters of two shapes, so that each gradient fits several of them."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(width, width), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def train(width=4, policy=BSP, *, put=None, make=sgd, rounds=ROUNDS):
    """Return how far parameters of any rank are from those of one process with the same samples.

    ``put`` is done before the first backward pass of a round, with the gradients of the former one.
    """
    model = net(width)
    x = torch.randn(BATCH * rounds, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.sin(x)

    def backward(model, index):
        functional.mse_loss(model(x[index]), y[index]).backward()

    def of_rank(rank):
        mine = copy.deepcopy(model)
        parameters, kept, seen = list(mine.parameters()), [], {}
        balance = LoadBalance(policy(), global_batch=BATCH)
        loader = BalancedLoader(TensorDataset(torch.arange(len(x))), balance, shuffle=True, seed=2)
        optimizer = DistributedOptimizer(make(mine.parameters()), balance, mine.named_parameters())
        for (index,) in loader:
            begins = balance.rounds not in seen
            seen.setdefault(balance.rounds, []).extend(index.tolist())
            if put is not None and kept and begins:
                put(parameters, kept)
            optimizer.zero_grad(set_to_none=put is None)
            backward(mine, index)
            optimizer.step()
            if balance.round_complete:
                kept[:] = [p.grad for p in parameters]
        return mine, seen

    models, seen = zip(*run_on_threads(of_rank, RANKS), strict=True)
    single = copy.deepcopy(model)
    optimizer = make(single.parameters())
    for round in range(rounds):
        optimizer.zero_grad()
        backward(single, [i for of_one in seen for i in of_one[round]])
        optimizer.step()
    pairs = [pair for m in models for pair in zip(m.parameters(), single.parameters(), strict=True)]
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def turned(gradients, by):
    """Each goes to another parameter of the same shape: weights and biases alternate."""
    return gradients[2 * by :] + gradients[: 2 * by]


def give(parameters, gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def to_a_neighbour(parameters, kept):
    parameters[0].grad, parameters[2].grad = kept[2], kept[0]


def far_away(parameters, kept):
    give(parameters, turned(kept, LAYERS // 2))


def some(parameters, kept):
    """The others have fresh ones."""
    give(parameters[::3], turned(kept, 1)[::3])


def by_data(parameters, kept):
    """With versions of their own, which begin at 0."""
    give(parameters, [gradient.data for gradient in turned(kept, 1)])


PUT = [to_a_neighbour, far_away, some, by_data]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("put", PUT)
def test_a_gradient_that_is_put_back_elsewhere_is_exact(policy, put):
    assert train(policy=POLICIES[policy], put=put) <= 1e-12


class Keeps(torch.optim.Optimizer):
    """Steps along this gradient and half of the last one, of which it keeps the very tensor."""

    def __init__(self, parameters, since, place):
        super().__init__(parameters, {"lr": 0.2})
        self.since, self.place, self.attribute, self.steps = since, place, {}, 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.place(self, p)
                p.sub_(p.grad + 0.5 * kept["last"] if "last" in kept else p.grad, alpha=group["lr"])
                if self.steps >= self.since:
                    kept["last"] = p.grad
        self.steps += 1


def in_state(optimizer, p):
    return optimizer.state[p]


def in_an_attribute(optimizer, p):
    return optimizer.attribute.setdefault(id(p), {})


@pytest.mark.parametrize("place", [in_state, in_an_attribute])
@pytest.mark.parametrize("since", [0, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_optimizer_may_keep_gradients_from_any_step_on(policy, since, place):
    assert train(policy=POLICIES[policy], make=lambda parameters: Keeps(parameters, since, place)) <= 1e-12
