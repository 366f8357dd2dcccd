"""Ranks that part, parameters that no rank sums, and losses that are not finite stop all ranks (here: threads)."""

from __future__ import annotations

import copy
import re

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from hvd_hetero.testing import ThreadRankError, run_on_threads  # noqa: E402
from torch_hooks import DistributedOptimizer, GradScaler, LoadBalance  # noqa: E402

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once
BATCH = 8
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
Y = torch.sin(X.sum(1, keepdim=True))


def network():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss(model):
    return functional.mse_loss(model(X), Y)


def steps(rank, model, rounds, *, disturb=lambda *_: None, lost=lambda *_: 1.0, **options):
    """Rounds of one batch; ``disturb(rank, round, model, optimizer)`` before each. Returns the rounds done."""
    balance = LoadBalance("bsp", global_batch=BATCH, **options)
    wrapped = DistributedOptimizer(inner := sgd(model), balance, model.named_parameters())
    for number in range(rounds):
        disturb(rank, number, model, inner)
        balance.batch(4)
        wrapped.zero_grad()
        (loss(model) * lost(rank, number)).backward()
        wrapped.step()
    return balance.rounds


@pytest.mark.parametrize("number", range(4))
def test_a_millionth_of_a_parameter_is_told_within_as_many_rounds_as_there_are_parameters(number):
    start = network()

    def disturb(rank, round, model, _):
        if rank == 1 and round == 20:
            list(model.parameters())[number].data.mul_(1 + 1e-6)

    with pytest.raises(ThreadRankError) as told:
        run_on_threads(lambda rank: steps(rank, copy.deepcopy(start), 60, disturb=disturb), ranks=2)
    pattern = r"round (\d+): ranks \[1\] hold other parameters than rank 0 \(here '(.*)', .* its"
    found = re.search(pattern, str(told.value))
    assert 20 < int(found[1]) <= 24
    assert found[2] == list(dict(start.named_parameters()))[number]


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
            given = inner.param_groups[-1]["params"][-1 if change is more else 1]
            apart.append((given, given.detach().clone()))  # at once: the other rank is a thread

    start = network()
    with pytest.raises(ThreadRankError, match=r"parameter.*add_param_group\(\)"):
        run_on_threads(lambda rank: steps(rank, copy.deepcopy(start), 6, disturb=disturb), ranks=2)
    assert apart
    assert all(torch.equal(now.detach(), before) for now, before in apart)


NAN, INFINITY = float("nan"), float("inf")


def broken(rank, round, value=NAN):
    return value if rank == 1 and round == 5 else 1.0


@pytest.mark.parametrize("value", [NAN, INFINITY])
@pytest.mark.parametrize("of_round", [0, 5])
def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_update_and_names_the_rank(value, of_round):
    left = {}

    def case(rank):
        model, before = copy.deepcopy(start), []

        def lost(rank, round):
            before[:] = [flat(model).clone()]
            return value if (rank, round) == (1, of_round) else 1.0

        try:
            steps(rank, model, 9, lost=lost)
        finally:
            left[rank] = torch.equal(flat(model), before[0])

    start = network()
    with pytest.raises(ThreadRankError, match=rf"round {of_round}: .*gradient.*ranks \[1\]"):
        run_on_threads(case, ranks=2)
    assert left == {0: True, 1: True}


def test_what_is_not_finite_can_be_allowed():
    assert run_on_threads(lambda rank: steps(rank, network(), 9, lost=broken, allow_nan=True), ranks=2) == [9, 9]


@pytest.mark.parametrize("of_round", [0, 5])
def test_what_a_scaler_skips_is_no_error_of_that_round_or_a_later_one(of_round):
    def case(rank):
        balance = LoadBalance("bsp", global_batch=BATCH)
        model = copy.deepcopy(start)
        wrapped = DistributedOptimizer(sgd(model), balance, model.named_parameters())
        scaler = GradScaler("cpu", optimizer=wrapped)
        for number in range(9):
            balance.batch(4)
            wrapped.zero_grad()
            scaler.scale(loss(model) * (INFINITY if (rank, number) == (1, of_round) else 1.0)).backward()
            scaler.step(wrapped)
            scaler.update()
        return balance.rounds, bool(flat(model).isfinite().all())

    start = network()
    assert run_on_threads(case, ranks=2) == [(9, True)] * 2
