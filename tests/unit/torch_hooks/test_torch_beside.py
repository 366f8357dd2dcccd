"""Scaled losses beside a reducer, on threads: what needs no process of its own."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from jobs_on_threads import told  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.data import Dataset, TensorDataset  # noqa: E402

from hvd_hetero import late_tables  # noqa: E402
from hvd_hetero.errors import RoundStateError  # noqa: E402
from hvd_hetero.policies import BSP, StaticAllocation  # noqa: E402
from hvd_hetero.rounds import RoundPlan  # noqa: E402
from hvd_hetero.session import balancer_of  # noqa: E402
from hvd_hetero.testing import ThreadRankError, run_on_threads  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance, SavedTraining  # noqa: E402
from torch_hooks.beside import comparison  # noqa: E402
from torch_hooks.cuda_stopwatch import CudaStopwatch  # noqa: E402
from torch_hooks.data import micro_batches  # noqa: E402
from torch_hooks.wires import threads  # noqa: E402

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once
SAMPLES, ROUNDS = 40, 12


class Unequal(BSP):
    """A fourth of each batch, and the rest."""

    def first(self, workers, global_batch):
        return RoundPlan.of([global_batch // 4, global_batch - global_batch // 4])


class Alternating(Unequal):
    def next(self, plan, finished):
        return RoundPlan.of(plan.samples[::-1])


class Indexed(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return i


@pytest.fixture(autouse=True)
def each_round_a_table(monkeypatch):
    monkeypatch.setattr(late_tables, "_SUM_CPU_S", 0.0)


def data():
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return x, x.sin().sum(1, keepdim=True)


def averaged(model, balance):
    wire = balance._session.wire
    for name, parameter in model.named_parameters():
        parameter.grad = wire.result(wire.start_sum(parameter.grad, name)) / wire.size


def line():
    model = torch.nn.Linear(3, 1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return model


def begun(policy="bsp", dataset=None, **options):
    """A balance, a model, its optimizer, and a loader."""
    balance, model = LoadBalance(policy, global_batch=8), line()
    loader = BalancedLoader(TensorDataset(data()[0]) if dataset is None else dataset, balance, **options)
    return balance, model, torch.optim.SGD(model.parameters(), lr=0.01), loader


def loop(rank, body, rounds=6, **options):
    balance = LoadBalance("bsp", global_batch=8)
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = BalancedLoader(TensorDataset(data()[0][: 8 * rounds]), balance, **options)
    for (x,) in loader:
        optimizer.zero_grad()
        body(balance, model, x, optimizer)
    return balance


def left_after(rounds, balance, model, loader, spoilt=None):
    """Leave a loop after so many rounds, of which one may be spoilt."""
    for (x,) in loader:
        factor = float("nan") if balance.rounds == spoilt else 1.0
        balance.scale(model(x).square().mean() * factor).backward()
        if balance.rounds == rounds:
            break


def trained(balance, model, x, optimizer):
    balance.scale(model(x).square().mean()).backward()
    averaged(model, balance)
    optimizer.step()


def test_a_step_with_a_closure_is_timed_once():
    def body(balance, model, x, optimizer):
        def closure():
            balance.scale(model(x).square().mean()).backward()
            averaged(model, balance)

        optimizer.step(closure)

    def case(rank):
        balance = loop(rank, body, 5)
        return balance.rounds, float(balancer_of(balance).finished.table.busy_s.max())

    for rounds, busy_s in run_on_threads(case, 2):
        assert rounds == 5
        assert busy_s > 0.0


def test_a_loop_that_is_left_after_its_step_has_done_the_round():
    def case(rank):
        balance, model, optimizer, loader = begun()
        left = []
        for (x,) in loader:
            trained(balance, model, x, optimizer)
            if balance.rounds == 1:
                break
        left.append(balance.rounds)
        for _ in loader:
            break  # nothing was done with it
        left.append(balance.rounds)
        for (x,) in loader:
            optimizer.zero_grad()
            trained(balance, model, x, optimizer)
        return [*left, balance.rounds]

    assert run_on_threads(case, 2) == [[2, 2, 7]] * 2


def test_each_iteration_may_be_left_at_its_first_batch():
    def case(rank):
        balance, model, optimizer, loader = begun()
        for _ in range(4):
            (x,) = next(iter(loader))
            optimizer.zero_grad()
            trained(balance, model, x, optimizer)
        next(iter(loader))
        return balance.rounds, balancer_of(balance).finished.round

    assert run_on_threads(case, 2) == [(4, 2)] * 2


def test_a_training_is_saved_after_a_batch_that_was_left_at_once(tmp_path):
    def case(rank):
        balance, model, optimizer, loader = begun()
        saved = SavedTraining(tmp_path / "run.pt", balance, loader, rounds_per_save=None, model=model)
        for i, (x,) in enumerate(loader):
            if i == 2:
                break
            optimizer.zero_grad()
            trained(balance, model, x, optimizer)
        saved.save()
        again = LoadBalance("bsp", global_batch=8)
        loader = BalancedLoader(TensorDataset(data()[0]), again)
        SavedTraining(tmp_path / "run.pt", again, loader, rounds_per_save=None, model=line())
        return again.rounds, loader.epoch_at_hand

    assert run_on_threads(case, 2) == [(2, 0)] * 2


def test_optimizers_of_a_rank_s_own_are_not_compared():
    """As those of inner loops, which are made in each batch; one that is made anew takes the former one's place."""

    def body(balance, model, x, optimizer):
        own = torch.nn.Parameter(x.mean(0))  # others on each rank
        torch.optim.SGD([own], lr=0.1).step()
        balance.scale(model(x).square().mean()).backward()
        averaged(model, balance)
        torch.optim.SGD(model.parameters(), lr=0.01).step()

    def case(rank):
        return loop(rank, body, 5).rounds

    assert run_on_threads(case, 2) == [5, 5]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_nests_a_backward_pass_is_told_of_once(caplog, reentrant):
    def body(balance, model, x, optimizer):
        x = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        balance.scale(x.square().mean()).backward()
        averaged(model, balance)
        optimizer.step()

    run_on_threads(lambda rank: loop(rank, body), 2)
    assert [record.message for record in caplog.records if "use_reentrant=False" in record.message][1:] == []
    assert ("use_reentrant=False" in caplog.text) == reentrant


def test_batches_of_a_user_s_own_follow_plans_that_change():
    """The table that decides a batch is read where it is announced."""

    def case(rank):
        balance, model, sizes = LoadBalance(Alternating(), global_batch=8), line(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(6):
            sizes.append(balance.batch())
            optimizer.zero_grad()
            trained(balance, model, torch.ones(sizes[-1], 3).double(), optimizer)
        with pytest.raises(ValueError, match=r"samples.* \d"):
            balance.batch(1)
        return sizes

    ours, theirs = run_on_threads(case, 2)
    assert set(ours) == {2, 6}
    assert [a + b for a, b in zip(ours, theirs, strict=True)] == [8] * 6


def test_a_weight_told_to_scale_counts_where_a_table_tells_of_several_rounds(monkeypatch):
    monkeypatch.setattr(late_tables, "_SUM_CPU_S", 1.5e-3)  # steps of a millisecond pay for few

    def case(rank):
        balance, model = LoadBalance(Unequal(), global_batch=8), line()
        gradients = []
        for index in BalancedLoader(Indexed(), balance):
            x = index.double().unsqueeze(1).expand(-1, 3) / SAMPLES
            counts = index % 3
            model.zero_grad()
            loss = (model(x).square().flatten() * counts).sum() / counts.sum().clamp(min=1)
            balance.scale(loss, weight=counts.sum()).backward()
            gradients.append((index.tolist(), model.weight.grad.clone()))
        return gradients

    ours, theirs = run_on_threads(case, 2)
    model = line()
    for (first, mine), (second, other) in zip(ours, theirs, strict=True):
        index = torch.tensor(first + second)
        x, counts = index.double().unsqueeze(1).expand(-1, 3) / SAMPLES, index % 3
        model.zero_grad()
        ((model(x).square().flatten() * counts).sum() / counts.sum()).backward()
        torch.testing.assert_close((mine + other) / 2, model.weight.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("costs", [(False, True), (True, False)])
def test_loaders_with_and_without_costs_may_share_a_balance(costs):
    def case(rank):
        balance, model = LoadBalance("lb-bsp", global_batch=8), line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for by_cost in costs * 2:
            lengths = [1.0 + i % 5 for i in range(SAMPLES)] if by_cost else None
            for index in BalancedLoader(Indexed(), balance, cost_of=lengths):
                optimizer.zero_grad()
                trained(balance, model, index.double().unsqueeze(1).expand(-1, 3) / SAMPLES, optimizer)
        return balance.rounds, balance.plan

    ours, theirs = run_on_threads(case, 2)
    assert ours == theirs
    assert ours[0] == 4 * SAMPLES // 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_micro_batch_cost": 3}, "max_micro_batch_cost.*cost_of"),
        ({"cost_of": [1.0] * (SAMPLES - 1)}, "cost_of.*40 samples.*39"),
        ({"cost_of": [1.0, -1.0] * (SAMPLES // 2)}, r"cost_of\[1\].*-1"),
        ({"cost_of": [1.0, 5.0] * (SAMPLES // 2), "max_micro_batch_cost": 4}, "max_micro_batch_cost.*index 1"),
        ({"weight_of": lambda batch: -1.0}, "weight_of.*-1"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"micro_batches": 5}, r"micro_batches.* 5\b"),
    ],
)
def test_what_a_loader_cannot_do_beside_a_reducer_is_refused(options, message):
    def case(rank):
        with pytest.raises(ValueError, match=message):
            loop(rank, trained, **options)

    run_on_threads(case, 2)


class Event:
    """In the place of a CUDA event, of a device whose time is ``device.now_s``."""

    def __init__(self, device):
        self._device = device

    def record(self, stream):
        self.at_s = self._device.now_s

    def query(self):
        return True

    def elapsed_time(self, other):
        return 1e3 * (other.at_s - self.at_s)


@pytest.mark.parametrize("several", [1, 2])
def test_a_loader_counts_what_the_loop_counts(several):
    def case(rank):
        balance, model, batches = LoadBalance("bsp", global_batch=8), line(), 0
        loader = BalancedLoader(
            TensorDataset(data()[0][:35]), balance, micro_batches=several
        )  # 3 are too few for 2 · 2
        expected = len(loader)
        for (x,) in loader:
            batches += 1
            balance.scale(model(x).square().mean()).backward()
        return batches - expected, balance.rounds

    assert run_on_threads(case, 2) == [(0, 6 - several)] * 2


def test_a_loss_that_is_normalised_already_keeps_its_weight():
    def case(rank):
        balance, model = LoadBalance(Unequal(), global_batch=8), line()
        next(iter(BalancedLoader(Indexed(), balance)))
        loss = next(iter(model.parameters())).sum()
        return float((balance.scale(loss, weight=1) / loss).detach())

    assert run_on_threads(case, 2) == [1.0, 1.0]


@pytest.mark.parametrize("shuffle", [False, True])
def test_rounds_that_an_earlier_job_has_done_are_left_out(shuffle):
    def case(rank):
        def visited(skip):
            balance, model, indices = LoadBalance(Unequal(), global_batch=8), line(), []
            loader = BalancedLoader(Indexed(), balance, shuffle=shuffle, seed=3)
            loader.set_epoch(2)
            if skip:
                loader.skip(skip)
            loader.set_epoch(2)
            for epoch in (2, 3):
                for index in loader:
                    indices.append((epoch, index.tolist()))
                    balance.scale(model(data()[0][index]).square().mean()).backward()
            return indices, len(loader)

        whole, length = visited(0)
        return visited(3) == (whole[3:], length)

    assert run_on_threads(case, 2) == [True, True]


def test_states_are_those_after_a_batch_that_is_done():
    def case(rank):
        balance, model, told = LoadBalance("bsp", global_batch=8), line(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = BalancedLoader(TensorDataset(data()[0]), balance)
        for i, (x,) in enumerate(loader):
            if i == 3:
                break
            optimizer.zero_grad()
            trained(balance, model, x, optimizer)
            if i == 1:
                states = balance.state_dict(), loader.state_dict()
            told.append(balance.rounds)
        with pytest.raises(RoundStateError, match=r"batch.*stop_at"):
            balance.state_dict()
        again = LoadBalance("bsp", global_batch=8)
        rest = BalancedLoader(TensorDataset(data()[0]), again)
        again.load_state_dict(states[0])
        rest.load_state_dict(states[1])
        return told, again.rounds, [x[:1].tolist() for (x,) in rest if again.scale(model(x).sum()).backward() is None]

    x = data()[0]
    assert run_on_threads(case, 2) == [
        ([0, 2, 2], 2, [[x[8 * r + 4 * rank].tolist()] for r in (2, 3, 4)]) for rank in range(2)
    ]


def closure(balance, model, x, optimizer):
    def loss():
        optimizer.zero_grad()
        loss = balance.scale(model(x).square().mean())
        loss.backward()
        averaged(model, balance)
        return loss

    torch.optim.LBFGS(model.parameters(), max_iter=3).step(loss)


def in_turn(balance, model, x, optimizer):
    trained(balance, model, x, optimizer)
    trained(balance, model, x, optimizer)


def weighing(weight):
    def body(balance, model, x, optimizer):
        balance.scale(model(x).square().mean(), weight=weight(balance)).backward()

    return body


def no_scalar(balance, model, x, optimizer):
    balance.scale(model(x))


def no_tensor(balance, model, x, optimizer):
    balance.scale(1.0)


def not_scaled(balance, model, x, optimizer):
    model(x).sum().backward()


def not_propagated(balance, model, x, optimizer):
    balance.scale(model(x).sum())


def accumulates(balance, model, x, optimizer):
    with balance.accumulate(model):
        pass


def scaled_twice(balance, model, x, optimizer):
    scaled = balance.scale(model(x).square().mean())
    scaled.backward()
    balance.scale(scaled)


def each_of_two(balance, model, x, optimizer):
    for _ in range(2):
        balance.scale(model(x).square().mean()).backward()


def without_gradient(balance, model, x, optimizer):
    with torch.no_grad():
        balance.scale(model(x).square().mean())


def wrapped_too_late(balance, model, x, optimizer):
    balance.scale(model(x).square().mean()).backward()
    DistributedOptimizer(optimizer, balance)


@pytest.mark.parametrize(
    ("body", "options", "message"),
    [
        (closure, {}, r"scale.*closure.*LBFGS"),
        (in_turn, {}, r"scale.*DistributedOptimizer.*also"),
        (lambda *_: None, {}, r"batch.*0 \* loss"),
        (no_scalar, {}, r"loss must be one number.*got shape \(4, 1\); scale loss.mean\(\)"),
        (no_tensor, {}, "TypeError: loss must be a tensor, got float"),
        (not_scaled, {}, r"the loss of the last batch was not scaled.*balance.scale\(loss\)"),
        (not_propagated, {}, "the scaled loss of the last batch was not used"),
        (scaled_twice, {}, "scale.. was called twice for one batch"),
        (each_of_two, {}, "scale.. was called twice for one batch.*of several models too.*scale their sum"),
        (without_gradient, {}, r"loss has no gradient: it was computed or scaled under torch.no_grad\(\)"),
        (wrapped_too_late, {}, "balance is used beside another reducer already"),
        (weighing(lambda balance: int(balance.rounds != 3)), {}, r"weight_of gave 0.*round 3\b"),
        (weighing(lambda balance: -1), {}, "weight must be.*-1"),
        (weighing(lambda balance: 3), {"weight_of": len}, "has the weight .* already, from weight_of"),
        (accumulates, {}, "TypeError: model must be a DistributedDataParallel or sharded by fully_shard"),
    ],
)
def test_a_body_that_a_reducer_of_one_s_own_does_not_go_with_is_told_why(body, options, message):
    with pytest.raises(ThreadRankError, match=message):
        run_on_threads(lambda rank: loop(rank, body, **options) and None, 2)


def test_a_loss_without_a_batch_and_ranks_without_data_are_refused():
    for said in told(lambda rank: LoadBalance("bsp", global_batch=8).scale(torch.ones(1))):
        assert "scale() was called without a batch" in said

    def case(rank):
        balance = LoadBalance(StaticAllocation([0, 1]), global_batch=8)
        for index in BalancedLoader(Indexed(), balance):
            balance.scale(line()(torch.ones(len(index), 3).double()).sum()).backward()

    for said in told(case):
        assert "policy 'static' needs DistributedOptimizer" in said


class Clock:
    """A rank's clock, by which a forward pass takes 10 ms for a sample, its backward pass 20, and an update 2."""

    def __init__(self, balance):
        self.now_s, balancer = 0.0, balancer_of(balance)
        balancer.meter.batch.clock = lambda: self.now_s

    def passes(self, seconds):
        self.now_s += seconds

    def loss(self, model, x):
        class Works(torch.autograd.Function):
            @staticmethod
            def forward(ctx, y):
                self.passes(0.01 * len(x))
                return y.clone()

            @staticmethod
            def backward(ctx, gradient):
                self.passes(0.02 * len(x))
                return gradient

        return Works.apply(model(x)).square().mean()


@pytest.fixture
def data_at_once(monkeypatch):
    """No rank waits for its data, however busy the machine is."""
    monkeypatch.setattr(micro_batches, "time", SimpleNamespace(perf_counter=lambda: 0.0))


def timed(top=lambda rounds, clock: None, rounds=12, leaves=lambda i: False, policy="lb-bsp", epochs=1, queued=False):
    """Return the rounds that tables tell of, their figures, and the last plan, of a training by such a clock.

    ``queued``: it is a device's, and the first table tells no times.
    """
    balance, model, tables = LoadBalance(policy, global_batch=8), line(), []
    clock, meter = Clock(balance), balancer_of(balance).meter
    if queued:
        meter.stopwatch, meter.queued = CudaStopwatch(torch.device("cpu"), lambda: Event(clock)), True
    balancer_of(balance).observer = tables.append
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: clock.passes(0.002))
    loader, plans = BalancedLoader(TensorDataset(data()[0].repeat(3, 1)[: 8 * rounds]), balance), set()
    for _ in range(epochs):
        for i, (x,) in enumerate(loader):
            if leaves(i):
                break
            plans.add(balance.plan)
            top(balance.rounds, clock)
            optimizer.zero_grad()
            balance.scale(clock.loss(model, x)).backward()
            averaged(model, balance)
            optimizer.step()
    names = ("samples", "compute_s", "input_s", "once_s")
    return [(each.round, {name: each.table.column(name) for name in names}) for each in tables], plans


@pytest.mark.usefixtures("data_at_once")
@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("costs_s", [0.0, 4e-3])
def test_an_evaluation_at_the_top_of_the_body_is_no_work_on_the_batch(monkeypatch, costs_s, queued):
    monkeypatch.setattr(late_tables, "_SUM_CPU_S", costs_s)

    def evaluates(rounds, clock):
        if rounds in (4, 9):
            clock.passes(3.0)

    def case(rank):
        return timed(evaluates if rank else lambda *_: None, queued=queued)

    for tables, plans in run_on_threads(case, 2):
        assert plans == {(4, 4)}
        assert tables[-1][0] == 11
        for _, figures in tables[queued:]:
            assert figures["compute_s"] == pytest.approx([0.122] * 2, abs=1e-6)


@pytest.mark.usefixtures("data_at_once")
def test_what_comes_with_every_batch_is_work_on_it():
    """As a teacher's forward pass is, or a slower processor."""

    def case(rank):
        return timed(lambda rounds, clock: clock.passes(0.3 * rank * (rounds > 5)), policy="bsp")[0]

    for tables in run_on_threads(case, 2):
        assert tables[-1][1]["compute_s"] == pytest.approx([0.122, 0.422])


@pytest.mark.usefixtures("data_at_once")
@pytest.mark.parametrize("costs_s", [0.0, 4e-3])
def test_the_update_comes_once_a_round(monkeypatch, costs_s):
    monkeypatch.setattr(late_tables, "_SUM_CPU_S", costs_s)
    for tables in run_on_threads(lambda rank: timed()[0], 2):
        for _, figures in tables:
            assert (figures["once_s"] - figures["input_s"]).tolist() == pytest.approx([0.002] * 2)


@pytest.mark.usefixtures("data_at_once")
@pytest.mark.parametrize("queued", [False, True])
def test_a_batch_that_is_left_unused_takes_no_finished_round_along(monkeypatch, queued):
    monkeypatch.setattr(late_tables, "_SUM_CPU_S", 5e-3)  # a table for five rounds

    def case(rank):
        return timed(leaves=lambda i: i == 3, epochs=6, policy="bsp", queued=queued)[0]

    for tables in run_on_threads(case, 2):
        assert [round for round, _ in tables] == ([0, 1, 6, 11, 16] if queued else [0, 5, 10, 15])
        for _, figures in tables[queued:]:
            assert figures["samples"].tolist() == [4, 4]
            assert figures["compute_s"].tolist() == pytest.approx([0.122] * 2)


@pytest.mark.parametrize("ends", ["epoch", "stop_at", "state", "close"])
def test_the_last_rounds_are_compared_where_all_ranks_come_to_an_end(monkeypatch, ends):
    monkeypatch.setattr(late_tables, "_SUM_CPU_S", 1.0)  # a table for 64 rounds

    def case(rank):
        balance, model, _, loader = begun(stop_at=4 if ends == "stop_at" else None)
        left_after(3 if ends in ("state", "close") else None, balance, model, loader, spoilt=3 if rank else None)
        if ends == "state":
            balance.state_dict()
        try:
            raise OSError("of something else")
        except OSError:
            balance.close()

    with pytest.raises(ThreadRankError, match=r"ranks \[1\] is not finite"):
        run_on_threads(case, 2)


def test_what_is_found_as_a_loop_is_left_is_raised_later(caplog):
    def case(rank):
        balance, model, _, loader = begun()
        left_after(3, balance, model, loader, spoilt=2 if rank else None)
        assert rank or "ranks [1] is not finite" in caplog.text
        balance.close()

    with pytest.raises(ThreadRankError, match=r"ranks \[1\] is not finite"):
        run_on_threads(case, 2)


def test_a_rank_that_does_not_come_to_close_is_not_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(comparison, "_CLOSE_WAITS_S", 0.05)
    monkeypatch.setattr(late_tables, "_SUM_CPU_S", 1.0)

    def case(rank):
        balance, model, _, loader = begun()
        left_after(3, balance, model, loader)
        if not rank:
            balance.close()

    run_on_threads(case, 2)
    assert "some rank did not call close()" in caplog.text


def test_close_says_what_was_not_compared_where_the_ranks_have_parted(monkeypatch, caplog):
    monkeypatch.setattr(late_tables, "_SUM_CPU_S", 1.0)  # so that rounds are left to tell of
    apart, starts = set(), threads.TorchThreadWire.start_sum

    def parted(wire, tensor, name):
        if wire.rank in apart:
            raise RoundStateError("the process group is gone")
        return starts(wire, tensor, name)

    monkeypatch.setattr(threads.TorchThreadWire, "start_sum", parted)

    def case(rank):
        balance, model, _, loader = begun()
        left_after(3, balance, model, loader)
        apart.add(rank)
        balance.close()

    run_on_threads(case, 2)
    assert "the last rounds were not compared (the process group is gone); call close() while" in caplog.text


@pytest.mark.parametrize("clears", [None, "before", "after the loss"])
def test_gradients_of_a_round_that_was_left_do_not_reach_the_next_one(clears):
    def case(rank):
        balance, model, _, loader = begun(micro_batches=2)
        for (x,) in loader:
            balance.scale(model(x).square().mean()).backward()
            break
        if clears == "before":
            model.zero_grad(set_to_none=False)
        for (_,) in loader:
            break  # at once, which takes nothing back
        for (x,) in loader:
            loss = balance.scale(model(x).square().mean())
            if clears == "after the loss" and not balance.round_complete:
                model.zero_grad()
            loss.backward()
            if balance.round_complete:
                return

    if clears:
        run_on_threads(case, 2)
    else:
        with pytest.raises(ThreadRankError, match=r"left in the middle of a round.*zero_grad"):
            run_on_threads(case, 2)


def test_a_former_training_is_forgotten():
    def case(rank):
        balance, former = LoadBalance("bsp", global_batch=8), []
        for _ in range(2):
            model = line()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for (x,) in BalancedLoader(TensorDataset(data()[0]), balance):
                optimizer.zero_grad()
                trained(balance, model, x, optimizer)
            former += [weakref.ref(model), weakref.ref(model.weight), weakref.ref(optimizer)]
            del model, optimizer
        gc.collect()
        return [each() is None for each in former]

    assert run_on_threads(case, 2) == [[True] * 6] * 2


def test_a_gradient_that_is_cleared_in_the_middle_of_a_round_is_an_error_after_a_former_training():
    def case(rank):
        balance, kept = LoadBalance("bsp", global_batch=8), []
        for clears in (False, True):
            model = line()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            kept.append(optimizer)
            for (x,) in BalancedLoader(TensorDataset(data()[0]), balance, micro_batches=2):
                if clears:
                    optimizer.zero_grad()
                balance.scale(model(x).square().mean()).backward()
                if balance.round_complete:
                    averaged(model, balance)
                    optimizer.step()

    with pytest.raises(ThreadRankError, match=r"zero_grad.*round"):
        run_on_threads(case, 2)


def test_each_of_two_trainings_in_one_loop_hears_of_its_optimizer():
    def case(rank):
        balances = [LoadBalance("bsp", global_batch=8) for _ in range(2)]
        models = [line() for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        loaders = [
            BalancedLoader(TensorDataset(data()[0]), balance, micro_batches=several)
            for balance, several in zip(balances, (1, 2), strict=True)
        ]
        for i, ((x,), (z,)) in enumerate(zip(*loaders, strict=False)):
            first = balances[0].scale(models[0](x).square().mean())
            balances[1].scale(models[1](z).square().mean()).backward()
            first.backward()
            averaged(models[0], balances[0])
            optimizers[0].param_groups[0]["lr"] = 0.01 + 0.01 * (rank and i > 2)
            optimizers[0].step()
            optimizers[0].zero_grad()
            if balances[1].round_complete:
                averaged(models[1], balances[1])
                optimizers[1].step()
                optimizers[1].zero_grad()

    with pytest.raises(ThreadRankError, match=r"ranks \[1\] have other hyper-parameters"):
        run_on_threads(case, 2)


def test_steps_and_scaled_losses_are_heard_of_where_they_are_compiled():
    def case(rank):
        balance, model = LoadBalance("bsp", global_batch=8), line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scale, step = (torch.compile(call, backend="eager") for call in (balance.scale, optimizer.step))
        for (x,) in BalancedLoader(TensorDataset(data()[0]), balance, micro_batches=2):
            scale(model(x).square().mean()).backward()
            if balance.rounds == 2 or balance.round_complete:
                step()

    with pytest.raises(ThreadRankError, match=r"step.. came in the middle of a round"):
        run_on_threads(case, 1)


def test_an_old_iteration_that_is_collected_ends_no_round_of_a_new_one():
    def case(rank):
        balance, model, _, loader = begun()
        old = iter(loader)
        next(old)
        new = iter(loader)
        (x,) = next(new)
        balance.scale(model(x).square().mean()).backward()
        del old
        gc.collect()
        return balance.rounds

    assert run_on_threads(case, 2) == [0, 0]


def test_normalised_gradients_are_not_taken_for_sums():
    def body(balance, model, x, optimizer):
        balance.scale(1e-3 * model(x).square().mean()).backward()
        averaged(model, balance)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        for p in model.parameters():
            p.grad /= norm
        optimizer.step()

    assert [balance.rounds for balance in run_on_threads(lambda rank: loop(rank, body, 5), 2)] == [5, 5]
