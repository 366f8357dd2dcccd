"""Noise of gradients, and batches that adapt, on ranks that are threads: beside what one process makes of it."""

from __future__ import annotations

import copy
import logging
import math
import time

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from hvd_hetero.balancer import Balancer  # noqa: E402
from hvd_hetero.policies import BSP, LBBSP, Goodput, SelfAdaptive, StaticAllocation  # noqa: E402
from hvd_hetero.testing import ThreadRankError, run_on_threads  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, GradScaler, LoadBalance  # noqa: E402
from torch_hooks.rates import Rates  # noqa: E402

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once
SAMPLES, START, RATE = 61, 8, 0.05
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(SAMPLES, 3, generator=GENERATOR, dtype=torch.float64)
Y = torch.sin(X.sum(1, keepdim=True)) + 0.5 * torch.randn(SAMPLES, 1, generator=GENERATOR, dtype=torch.float64)
WORDS = torch.randint(0, 5, (SAMPLES, 2), generator=GENERATOR)


class Changing(Goodput):
    """Another batch in every round, whatever it costs."""

    def chosen(self, total, between, seconds):
        return {8: 12, 12: 6, 6: 16, 16: 8}[total]


def changing(**options):
    return Changing(start=START, least=6, most=16, **options)


@pytest.fixture(autouse=True)
def every_round(monkeypatch):
    monkeypatch.setattr("hvd_hetero.policies.goodput._ROUNDS_PER_DECISION", 1)
    monkeypatch.setattr("hvd_hetero.measurement.gradient_noise._INTERVAL_IF_SHOWN", 1)


def dense():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(5, 4, sparse=True)
        self.out = torch.nn.Linear(4, 1)

    def forward(self, words):
        return self.out(self.words(words).sum(1))


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient(model, data, index):
    model.zero_grad()
    functional.mse_loss(model(data[index]), Y[index]).backward()
    return torch.cat([p.grad.to_dense().flatten() for p in model.parameters()])


def on_threads(model, policy, batch, rounds, *, ranks=3, data=X, rate=RATE, scaled=False, **options):
    """Train copies; returns parameters, every rank's samples of each round, noise scales of the records, progress."""

    def case(rank):
        mine = copy.deepcopy(model)
        balance = LoadBalance(policy(), global_batch=batch(), **options)
        loader = BalancedLoader(TensorDataset(data, Y, torch.arange(SAMPLES)), balance, shuffle=True, stop_at=rounds)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(mine.parameters(), lr=rate), balance, named_parameters=mine.named_parameters()
        )
        scaler = GradScaler("cpu", optimizer=optimizer, enabled=scaled, init_scale=1024.0, growth_interval=3)
        scales, seen = [], [[] for _ in range(rounds)]
        balance.on_round(lambda record: scales.append(record.get("noise_scale")))
        while balance.rounds < rounds:
            for x, y, index in loader:
                seen[balance.rounds] += index.tolist()
                optimizer.zero_grad()
                scaler.scale(functional.mse_loss(mine(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
        balance.close()
        assert optimizer.param_groups[0]["lr"] == rate, "the user's learning rate stays"
        return flat(mine), seen, scales, balance.progress

    parameters, seen, scales, progress = zip(*run_on_threads(case, ranks), strict=True)
    assert len(set(progress)) == 1
    assert all((of == parameters[0]).all() for of in parameters), "the same bits"
    return parameters[0], list(zip(*seen, strict=True)), scales[0], progress[0]


def expected(model, rounds, *, power, data=X, rate=RATE, measured=lambda round: True):
    """One process on the same rounds: parameters, noise scale after each round, and progress."""
    model, variances, squares, scales, progress = copy.deepcopy(model), [], [], [], 0.0
    for number, parts in enumerate(rounds):
        index = [i for part in parts for i in part]
        known = bool(squares) and sum(squares) > 0
        scale = sum(variances) / sum(squares) if known else math.inf
        scales.append(scale if squares else None)
        worth = 1.0
        if squares:
            worth = (scale / START + 1) / (scale / len(index) + 1) if known else len(index) / START
        progress += worth
        whole = gradient(model, data, index)
        own = [(len(part), gradient(model, data, part)) for part in parts if part]
        if measured(number) and len(own) > 1:
            variance = sum(b * (g - whole).square().sum() for b, g in own) / (len(own) - 1)
            variances.append(float(variance))
            squares.append(float(whole.square().sum() - variance * (1 / len(index) - 1 / SAMPLES)))
        step, begin = rate * worth**power * whole, 0
        for p in model.parameters():
            p.data -= step[begin : begin + p.numel()].view_as(p)
            begin += p.numel()
    return flat(model), scales, progress


def require_same_noise(found, wanted):
    assert len(found) == len(wanted)
    for mine, other in zip(found, wanted, strict=True):
        assert (mine is None) == (other is None or other == math.inf)
        if mine is not None:
            assert mine == pytest.approx(other, rel=1e-8)


@pytest.mark.parametrize(
    "policy", [lambda: StaticAllocation([3, 1, 2]), lambda: BSP(max_micro_batch=2), lambda: StaticAllocation([0, 1, 3])]
)
def test_the_noise_scale_is_what_the_ranks_gradients_say(policy):
    model = dense()
    parameters, rounds, scales, progress = on_threads(model, policy, lambda: 12, 12)
    wanted, noise, _ = expected(model, rounds, power=0.0)
    torch.testing.assert_close(parameters, wanted, rtol=0, atol=1e-10)
    require_same_noise(scales, noise)
    assert sum(scale is not None for scale in scales) > 2
    assert progress == 12, "without an adaptive batch, rounds"


def test_rows_of_sparse_gradients_and_scaled_ones_tell_the_same():
    for model, data, scaled in ((Bag().double(), WORDS, False), (dense(), X, True)):
        _, rounds, scales, _ = on_threads(
            model, lambda: StaticAllocation([3, 1, 2]), lambda: 12, 10, data=data, scaled=scaled
        )
        require_same_noise(scales, expected(model, rounds, power=0.0, data=data)[1])


@pytest.mark.parametrize(("rule", "power"), [("adascale", 1.0), ("square-root", 0.5), ("constant", 0.0)])
@pytest.mark.parametrize("policy", [LBBSP, lambda: BSP(max_micro_batch=3), lambda: LBBSP(may_rest=True)])
def test_a_changing_batch_trains_as_one_process_does_and_visits_each_sample_once(policy, rule, power):
    model, rounds = dense(), 14
    parameters, seen, scales, progress = on_threads(
        model, policy, lambda: changing(learning_rate=rule), rounds, ranks=2
    )
    wanted, noise, worth = expected(model, seen, power=power)
    torch.testing.assert_close(parameters, wanted, rtol=0, atol=1e-10)
    require_same_noise(scales, noise)
    assert progress == pytest.approx(worth, rel=1e-9)
    assert len({sum(map(len, parts)) for parts in seen}) >= 4
    visited = [i for parts in seen for part in parts for i in part]
    assert sorted(visited[:SAMPLES]) == list(range(SAMPLES))


def test_worker_processes_fix_batches_ahead(tmp_path):
    model = dense()

    def case(rank):
        mine, seen = copy.deepcopy(model), []
        balance = LoadBalance("bsp", global_batch=changing())
        data = TensorDataset(X, Y, torch.arange(SAMPLES))
        loader = BalancedLoader(data, balance, stop_at=10, num_workers=1, prefetch_factor=2)
        optimizer = DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=RATE), balance, mine.named_parameters())
        while balance.rounds < 10:
            for x, y, index in loader:
                seen.append(index.tolist())
                optimizer.zero_grad()
                functional.mse_loss(mine(x), y).backward()
                optimizer.step()
        balance.close()
        return flat(mine), seen

    parameters, seen = zip(*run_on_threads(case, 2), strict=True)
    rounds = list(zip(*seen, strict=True))
    wanted, _, _ = expected(model, rounds, power=1.0)
    torch.testing.assert_close(parameters[0], wanted, rtol=0, atol=1e-10)
    assert len({sum(map(len, parts)) for parts in rounds}) >= 3


def refused(case, message):
    with pytest.raises(ThreadRankError, match=message):
        run_on_threads(case, 2)


def test_what_cannot_adapt_is_refused_with_a_remedy():
    refused(lambda rank: LoadBalance("non-blocking", global_batch=changing()), "decides more")
    refused(lambda rank: LoadBalance("bsp", global_batch=changing()).also(), "does not go with also")


def beside(use, **options):
    """Refuse what a batch that adapts cannot do beside a reducer."""

    def case(rank):
        model, balance = dense(), LoadBalance("bsp", global_batch=changing())
        loader = BalancedLoader(TensorDataset(X, Y), balance, **options)
        use(balance, loader, model)

    return case


def scaled_as_normalised(balance, loader, model):
    for x, y in loader:
        balance.scale(functional.mse_loss(model(x), y), normalised=True)


def test_what_cannot_adapt_beside_a_reducer_is_refused_at_once():
    refused(beside(scaled_as_normalised), "normalised")
    refused(beside(lambda balance, loader, model: loader.skip(2)), r"state_dict\(\)")
    refused(beside(lambda balance, loader, model: next(iter(loader)), micro_batches=4), "least.*at least 8.*got 6")


def test_progress_beside_a_reducer_counts_on_from_a_state_that_takes_rounds_back():
    def case(rank):
        model, balance = dense(), LoadBalance("bsp", global_batch=changing())
        optimizer, loader = torch.optim.SGD(model.parameters(), lr=RATE), BalancedLoader(TensorDataset(X, Y), balance)

        def train(rounds):
            loader.stop_at = rounds
            for x, y in loader:
                optimizer.zero_grad()
                balance.scale(functional.mse_loss(model(x), y)).backward()
                optimizer.step()

        train(2)
        state = balance.state_dict()
        train(5)
        balance.load_state_dict(state)
        train(4)
        return balance.rounds, balance.progress

    assert run_on_threads(case, 1) == [(4, 4.0)]


def test_a_schedule_that_counts_steps_is_told_of_progress(caplog):
    def case(rank):
        model = dense()
        balance = LoadBalance("bsp", global_batch=changing())
        loader = BalancedLoader(TensorDataset(X, Y), balance, stop_at=4)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), balance)
        torch.optim.lr_scheduler.StepLR(optimizer, 100)
        for x, y in loader:
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
        balance.close()

    with caplog.at_level(logging.WARNING):
        run_on_threads(case, 2)
    told = [record for record in caplog.records if "balance.progress" in record.getMessage()]
    assert len(told) == 1, "once, on rank 0"


@pytest.mark.parametrize("capturable", [False, True])
def test_rates_are_the_users_own_outside_of_the_update_and_in_hooks_of_the_step(capturable):
    balancer = Balancer(BSP(), 0, 1, 8, clock=time.monotonic)
    balancer.planner.rate_factor = 1.5
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(0.5) if capturable else 0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    rates = Rates(balancer)
    for rate, value in ((0.5, 0.25), (0.25, -0.125)):
        assert optimizer.param_groups[0]["lr"] == rate
        parameter.grad = torch.ones(1)
        rates.multiply(optimizer)
        optimizer.step()
        assert parameter.item() == value
    assert optimizer.param_groups[0]["lr"] == 0.125
    rates.multiply(optimizer)
    rates.restore()  # without a step, as if it had raised
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_second_training_with_the_same_objects_begins_anew():
    batch, policy, start = changing(), SelfAdaptive(total=4), dense()

    def train(**arguments):
        balance = LoadBalance(**arguments)
        loader = BalancedLoader(TensorDataset(X, Y), balance, shuffle=True, stop_at=9)
        model = copy.deepcopy(start)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), balance)
        totals = []
        while balance.rounds < 9:
            for x, y in loader:
                totals.append(sum(balance.plan))
                functional.mse_loss(model(x), y).backward()
                optimizer.step()
        balance.close()
        return totals, balance.progress, flat(model).tolist(), balance.policy

    def case(rank):
        return [train(policy="bsp", global_batch=batch) for _ in range(2)], [
            train(policy=policy, global_batch=START)[-1] for _ in range(2)
        ]

    for trainings, policies in run_on_threads(case, 2):
        first, second = (each[:3] for each in trainings)
        assert first == second
        assert first[1] != 9.0
        assert len({id(each) for each in (policy, *policies)}) == 3
    assert batch.progress == 0.0
    assert policy.state_dict() == SelfAdaptive(total=4).state_dict(), "what was given is as it was"
