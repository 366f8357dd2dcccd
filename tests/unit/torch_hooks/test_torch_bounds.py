"""Bounds of memory on ranks that are threads: said by users, and out of memory beside a reducer."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import TensorDataset  # noqa: E402

from hvd_hetero.errors import PlanMismatchError, RoundStateError  # noqa: E402
from hvd_hetero.measurement.memory import CudaGauge  # noqa: E402
from hvd_hetero.policies import BSP, LBBSP, StaticAllocation  # noqa: E402
from hvd_hetero.session import balancer_of  # noqa: E402
from hvd_hetero.testing import ThreadRankError, run_on_threads  # noqa: E402
from torch_hooks import BalancedLoader, LoadBalance  # noqa: E402
from torch_hooks.beside import redone  # noqa: E402

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once
SAMPLES = 48


def sizes_of(policy, batch=12, steps_each_time=True, **options):
    """Each rank's batches beside a reducer that does nothing."""

    def train(rank):
        model = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        balance = LoadBalance(policy(rank), global_batch=batch)
        data = TensorDataset(torch.ones(SAMPLES, 2), torch.arange(SAMPLES))
        more = {name: value(rank) if callable(value) else value for name, value in options.items()}
        sizes, visited = [], []
        for x, index in BalancedLoader(data, balance, **more):
            balance.scale(model(x).mean()).backward()
            if steps_each_time or balance.round_complete:
                optimizer.step()
                optimizer.zero_grad()
            sizes.append(len(x))
            visited += index.tolist()
        balance.close()
        return sizes, visited

    results = run_on_threads(train, 2, 60.0)
    assert sorted(i for _, visited in results for i in visited) == list(range(SAMPLES))
    return [sizes for sizes, _ in results]


def failure(*args, **options):
    with pytest.raises(ThreadRankError) as caught:
        sizes_of(*args, **options)
    return caught.value.__cause__


@pytest.mark.parametrize("policy", [BSP, LBBSP, lambda **more: StaticAllocation([1, 3], **more)])
def test_a_list_bounds_the_batches_of_each_rank_beside_any_reducer(policy):
    one, other = sizes_of(lambda rank: policy(max_micro_batch=[8, 4]))
    assert (one, other) == ([8] * 4, [4] * 4)
    one, other = sizes_of(lambda rank: policy(max_micro_batch=[4, 2]), steps_each_time=False, micro_batches=2)
    assert (one, other) == ([4] * 8, [2] * 8)


def test_an_allocation_by_hand_keeps_to_bounds_beside_a_reducer():
    assert sizes_of(lambda rank: StaticAllocation([5, 1])) == [[10] * 4, [2] * 4]
    assert sizes_of(lambda rank: StaticAllocation([5, 1], max_micro_batch=7)) == [[7] * 4, [5] * 4]


def test_a_climb_over_sizes_keeps_to_bounds_beside_a_reducer():
    one, other = sizes_of(lambda rank: LBBSP(device="gpu", max_micro_batch=[12, 7]), 16)
    assert max(one) <= 12
    assert max(other) <= 7
    assert len({*one}) > 1


def test_a_bound_of_its_own_on_each_rank_is_an_error_that_says_how_to_write_it():
    error = failure(lambda rank: LBBSP(max_micro_batch=[8, 4][rank]))
    assert isinstance(error, PlanMismatchError)
    assert "max_micro_batch must be the same on all ranks, got 4 on rank 1 and 8 on rank 0" in str(error)
    assert "max_micro_batch=[…]" in str(error)
    error = failure(lambda rank: BSP(), cost_of=[2.0] * SAMPLES, max_micro_batch_cost=lambda rank: [8.0, 9.0][rank])
    assert isinstance(error, PlanMismatchError)
    assert "max_micro_batch_cost must be the same on all ranks, got 9.0 on rank 1" in str(error)


def test_costs_bound_the_batches_of_each_rank():
    def costs(bounds, **more):
        return sizes_of(lambda rank: BSP(), cost_of=[2.0] * SAMPLES, max_micro_batch_cost=bounds, **more)

    assert costs([16.0, 8.0]) == [[8] * 4, [4] * 4]
    with pytest.raises(ThreadRankError, match=r"max_micro_batch_cost must hold one bound for each of 2 ranks, got 3"):
        costs([16.0, 8.0, 8.0])
    assert costs({"cpu": 12.0}) == [[6] * 4, [6] * 4]
    one, other = costs([8.0, 4.0], steps_each_time=False)
    assert max(one) <= 4
    assert max(other) <= 2


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({}, RoundStateError, r"round_complete.*global_batch=12 does not fit.*rank 0: 4, rank 1: 3\).*global_batch=7 "),
        ({"micro_batches": 1}, ValueError, r"global_batch=12 does not fit: in 1 micro-batch.*micro_batches=2 "),
    ],
)
def test_what_no_rank_can_take_is_an_error_before_the_first_step(options, kind, message):
    error = failure(lambda rank: LBBSP(max_micro_batch=[4, 3]), **options)
    assert isinstance(error, kind)
    with pytest.raises(kind, match=message):
        raise error


class Fails(torch.autograd.Function):
    """Runs out of memory in its backward pass, if it is told to."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise torch.OutOfMemoryError("CUDA out of memory (a test)")
        return gradient, None


class Net(torch.nn.Module):
    """Rank 0 holds ``fits`` samples; beyond, ``place`` of its first attempts in round ``at`` fails."""

    def __init__(self, rank, balance, fits=4, place="forward", at=2):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
        dice = torch.Generator().manual_seed(3)
        for p in self.layers.parameters():
            p.data = torch.randn(p.shape, generator=dice, dtype=torch.float64) / 2
        self.rank, self.balance, self.fits, self.place, self.at = rank, balance, fits, place, at
        self.failed = 0

    def forward(self, x):
        fails = self.rank == 0 and len(x) > self.fits and self.balance is not None and self.balance.rounds >= self.at
        if self.place == "second backward" and fails:
            fails = balancer_of(self.balance).accumulating
        self.failed += fails
        if fails and (self.place == "forward" or (self.place == "early backward" and self.balance.round_complete)):
            raise torch.OutOfMemoryError("CUDA out of memory (a test)")
        hidden = self.layers[1](self.layers[0](x))
        return self.layers[2](Fails.apply(hidden, fails))


X = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
TOKENS = torch.randint(1, 5, (SAMPLES,), generator=torch.Generator().manual_seed(6)).double()


def loss_of(net, index, weigh):
    losses = (net(X[index]).squeeze(1) - X[index].sum(1)) ** 2
    counts = TOKENS[index] if weigh else torch.ones(len(index), dtype=torch.float64)
    return (losses * counts).sum() / counts.sum()


def surviving(
    rank, shares=(1, 1), net_options=None, weigh=False, clears="before", scaler=False, copies=True, **options
):
    """A plain loop beside a reducer that reduces as the last backward pass of a round ends, as DDP's does."""
    balance = LoadBalance(StaticAllocation(list(shares)), global_batch=12)
    net = Net(rank, balance, **net_options or {})
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    wire = balance._session.wire
    if weigh:
        options["weight_of"] = lambda batch: TOKENS[batch[0]].sum()
    loader = BalancedLoader(TensorDataset(torch.arange(SAMPLES)), balance, **options)
    scales = torch.amp.GradScaler("cpu", init_scale=2.0**8) if scaler else None
    rounds, begins = {}, True

    def reduce():
        for name, p in net.named_parameters():
            p.grad = wire.result(wire.start_sum(p.grad, name)) / wire.size

    def later(gradient):
        torch.autograd.Variable._execution_engine.queue_callback(reduce)

    for _ in range(2):
        for (index,) in loader:
            balance._session.beside.redone.copies = copies
            with balance.surviving_out_of_memory():
                if clears != "after" and begins:
                    optimizer.zero_grad(set_to_none=clears == "before")
                begins, number, failed = False, balance.rounds, net.failed
                loss = balance.scale(loss_of(net, index, weigh))
                if net.failed == failed:  # else its backward pass will
                    rounds.setdefault(number, []).append(index.tolist())
                if balance.round_complete:
                    loss.register_hook(later)
                (scales.scale(loss) if scaler else loss).backward()
                begins = balance.round_complete
                if begins:
                    if scaler:
                        scales.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                    scales.step(optimizer) if scaler else optimizer.step()
                    if scaler:
                        scales.update()
                    if clears == "after":
                        optimizer.zero_grad()
    balance.close()
    return rounds, [p.detach() for p in net.parameters()], net.failed, balance.plan


def one_process(rounds, weigh):
    net = Net(1, None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for number in sorted(rounds[0]):
        index = torch.tensor([i for rank in rounds for part in rank[number] for i in part])
        optimizer.zero_grad()
        loss_of(net, index, weigh).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return list(net.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clears": "after"},
        {"clears": "to zeros"},
        {"weigh": True},
        {"scaler": True},
        {"net_options": {"fits": 1}},
        {"net_options": {"at": 0}},
        {"micro_batches": 2, "net_options": {"fits": 2}},
        {"micro_batches": 2, "net_options": {"fits": 2}, "clears": "after", "weigh": True},
        {"micro_batches": 3, "net_options": {"fits": 1}, "shares": (2, 1)},
        {"micro_batches": 2, "net_options": {"fits": 2, "place": "early backward"}},
        {"micro_batches": 3, "net_options": {"fits": 1, "place": "early backward"}, "clears": "after", "weigh": True},
        {"micro_batches": 3, "net_options": {"fits": 1}, "copies": False},
        {"micro_batches": 2, "net_options": {"fits": 2, "place": "early backward"}, "copies": False},
    ],
    ids=str,
)
def test_out_of_memory_beside_a_reducer_is_done_again_in_parts(options):
    results = run_on_threads(lambda rank: surviving(rank, **options), 2, 60.0)
    rounds = [rounds for rounds, *_ in results]
    assert results[0][2] >= 1
    assert sorted(i for rank in rounds for parts in rank.values() for part in parts for i in part) == sorted(
        [*range(SAMPLES)] * 2
    )
    expected = one_process(rounds, options.get("weigh", False))
    for _, parameters, *_ in results:
        for ours, theirs in zip(parameters, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-9)
    fits = options.get("net_options", {}).get("fits", 4)
    assert max(len(part) for parts in list(rounds[0].values())[3:] for part in parts) <= max(fits, 1)


class DeepSpeedEngine(torch.nn.Module):
    """Known by its name, as a package that may not be there."""


@pytest.mark.parametrize(
    ("options", "engine", "when"),
    [
        ({"net_options": {"place": "backward"}}, None, "where gradients may have left for other ranks"),
        (
            {"micro_batches": 3, "net_options": {"fits": 1, "place": "second backward"}, "copies": False}, None,
            "where gradients may have left for other ranks",
        ),
        ({}, DeepSpeedEngine(), r"with layers that wait for other ranks \(FSDP2, DeepSpeed"),
    ],
)  # fmt: skip
def test_out_of_memory_where_nothing_can_be_done_again_ends_all_ranks_by_name(options, engine, when, monkeypatch):
    monkeypatch.setattr(redone, "_alive", lambda kind: [engine] if isinstance(engine, kind) else [])
    with pytest.raises(ThreadRankError) as caught:
        run_on_threads(lambda rank: surviving(rank, **options), 2, 60.0)
    assert re.search(f"round 2: rank 0 ran out of memory {when}", str(caught.value))
    assert re.search(r"set max_micro_batch of the policy below \d", str(caught.value))


def test_a_norm_of_all_ranks_among_what_is_reduced_waits_in_its_layers():
    norm, linear = torch.nn.SyncBatchNorm(3), torch.nn.Linear(3, 3)
    of_norm, of_linear = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (norm, linear))
    assert redone._waits_in_layers([of_linear, of_norm])
    assert not redone._waits_in_layers([of_linear])


def test_a_cuda_gauge_tells_what_the_allocator_and_others_leave(monkeypatch):
    """Of 100 bytes others hold 30; this process has reserved 25, and may have 60 % of all."""
    told = {"mem_get_info": (45, 100), "memory_reserved": 25, "max_memory_allocated": 20}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0, raising=False)
    gauge = CudaGauge(torch.cuda)
    assert (gauge.peak(), gauge.available()) == (20.0, 70.0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 0.6)
    assert gauge.available() == 60.0


def test_a_share_of_memory_is_a_share():
    with pytest.raises(ValueError, match=r"memory must be a fraction from 0 to 1, got 90"):
        LoadBalance("bsp", global_batch=4, memory=90)


def test_a_batch_of_the_users_own_making_keeps_to_bounds():
    def case(rank):
        balance = LoadBalance(BSP(max_micro_batch=[8, 4]), global_batch=12)
        return balance.batch()

    assert run_on_threads(case, 2, 60.0) == [8, 4]
