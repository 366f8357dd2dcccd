"""What ranks send each other beside dense gradients, on ranks that are threads, compared with one process."""

from __future__ import annotations

import copy
import itertools

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402
from torch.utils.data import TensorDataset, default_collate  # noqa: E402

from hvd_hetero.communication.thread_wire import Crew  # noqa: E402
from hvd_hetero.errors import PlanMismatchError  # noqa: E402
from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, LBNonBlocking, StaticAllocation  # noqa: E402
from hvd_hetero.rounds import RoundPlan  # noqa: E402
from hvd_hetero.testing import ThreadRankError, run_on_threads  # noqa: E402
from hvd_hetero.topology.mixing import resolve_mixing  # noqa: E402
from torch_hooks import (  # noqa: E402
    BalancedLoader,
    DistributedOptimizer,
    GradScaler,
    LoadBalance,
    SyncBatchNorm,
    average_by_samples,
)
from torch_hooks.wires.choice import wire_here  # noqa: E402
from torch_hooks.wires.threads import TorchThreadWire  # noqa: E402

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once
SAMPLES, BATCH = 26, 8  # three rounds an epoch; with three ranks, the last one has two samples more
GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(SAMPLES, 3, generator=GENERATOR, dtype=torch.float64)
Y = torch.sin(X.sum(1, keepdim=True))
WORDS = torch.randint(0, 5, (SAMPLES, 2), generator=GENERATOR)
EPOCHS = 2


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def dense():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def loss(model, x, y):
    return functional.mse_loss(model(x), y)


def train(model, balance, make=sgd, data=X, *, drop_last=False, **options):
    """As a user would; returns the parameters, and the samples of this rank in each round."""
    dataset = TensorDataset(data, Y, torch.arange(SAMPLES))
    loader = BalancedLoader(dataset, balance, shuffle=True, seed=2, drop_last=drop_last)
    optimizer = DistributedOptimizer(make(model), balance, model.named_parameters(), **options)
    seen = {}
    for _ in range(EPOCHS):
        for x, y, index in loader:
            seen.setdefault(balance.rounds, []).append(index.tolist())
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()
    balance.close()
    return flat(model), seen


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def union(seen):
    """The samples of each round, whatever rank had them."""
    return [[i for of_rank in seen for part in of_rank.get(r, []) for i in part] for r in sorted(set().union(*seen))]


def single(model, seen, make=sgd, data=X):
    optimizer = make(model)
    for index in union(seen):
        optimizer.zero_grad()
        loss(model, data[index], Y[index]).backward()
        optimizer.step()
    return flat(model)


def on_threads(model, ranks=3, policy=lambda: StaticAllocation([3, 1, 2]), data=X, make=sgd, prepare=None, **options):
    """Train copies of the model; returns every rank's parameters and samples."""

    def case(rank):
        balance = LoadBalance(policy(), global_batch=BATCH)
        mine = copy.deepcopy(model)
        return train(mine if prepare is None else prepare(mine, balance), balance, make, data, **options)

    parameters, seen = zip(*run_on_threads(case, ranks), strict=True)
    return torch.stack(parameters), seen


def require_same(parameters, expected):
    torch.testing.assert_close(parameters, expected.expand_as(parameters), rtol=0, atol=1e-10)
    assert (parameters == parameters[0]).all(), "the same bits"


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(5, 4, sparse=True)
        self.out = torch.nn.Linear(4, 1)

    def forward(self, words):
        return self.out(self.words(words).sum(1))


def test_rows_of_sparse_gradients():
    model = Bag().double()
    parameters, seen = on_threads(model, data=WORDS)
    require_same(parameters, single(model, seen, data=WORDS))


class Halves:
    """Sends half of each number, and doubles the sums: exact, so that what is lost is the code's doing."""

    @staticmethod
    def compress(tensor):
        return tensor / 2, None

    @staticmethod
    def decompress(tensor, context):
        return tensor * 2


@pytest.mark.parametrize("model", [dense, lambda: Bag().double()], ids=["dense", "sparse"])
def test_compressed_gradients(model):
    model = model()
    data = WORDS if isinstance(model, Bag) else X
    parameters, seen = on_threads(model, data=data, compression=Halves)
    require_same(parameters, single(model, seen, data=data))


def test_batch_norm_over_all_ranks():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).double()
    prepare = SyncBatchNorm.convert_sync_batchnorm
    parameters, seen = on_threads(model, policy=BSP, prepare=prepare, drop_last=True)
    assert {len(part) for of_rank in seen for parts in of_rank.values() for part in parts} == {2, 3}
    require_same(parameters, single(model, seen))


class Turns(BSP):
    """Unequal shares, which go round among the ranks, in micro-batches of at most so many samples."""

    def first(self, workers, global_batch):
        shares = [global_batch * part // 12 for part in ([4, 8] if workers == 2 else [2, 6, 4])]
        return RoundPlan.of(shares, self.max_micro_batch)

    def next(self, plan, finished):
        return RoundPlan.of([*plan.samples[1:], plan.samples[0]], self.max_micro_batch)


COUNTS = torch.arange(SAMPLES) % 4 + 1.0  # of each sample, in its mean
LEFT_OUT = (3, 12, 21)


def weight_of(batch):
    return COUNTS[batch[2]].sum()


def some(samples):
    return default_collate([sample for sample in samples if int(sample[2]) not in LEFT_OUT])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (Turns, {"weight_of": weight_of}),
        (Turns, {"weight_of": weight_of, "collate_fn": some, "drop_last": True}),
        (lambda: Turns(max_micro_batch=2), {"weight_of": weight_of}),
        (lambda: Turns(max_micro_batch=3), {}),
        (Turns, {"cost_of": COUNTS.numpy(), "max_micro_batch_cost": 9.0}),
        (lambda: StaticAllocation([1, 2, 3]), {}),
    ],
    ids=["weights", "samples left out", "weights, micro-batches", "micro-batches", "costs", "static"],
)
def test_batch_norm_over_unequal_batches_that_count_unequally(policy, options, ranks):
    """One process normalises the j-th micro-batches of all ranks together, of the rows that are there."""
    counts = COUNTS if "weight_of" in options else torch.ones(SAMPLES)

    def mean(model, x, y, index, whole=None):
        part = counts[index][:, None] * (model(x) - y) ** 2
        return part.sum() / (counts[index].sum() if whole is None else whole)

    def case(rank):
        made = policy()
        if isinstance(made, StaticAllocation):
            made = StaticAllocation(made.weights[:ranks])
        balance = LoadBalance(made, global_batch=12)
        mine = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model), balance)
        loader = BalancedLoader(TensorDataset(X, Y, torch.arange(SAMPLES)), balance, shuffle=True, seed=2, **options)
        optimizer = DistributedOptimizer(sgd(mine), balance, mine.named_parameters())
        seen = {}
        for _ in range(EPOCHS):
            for x, y, index in loader:
                seen.setdefault(balance.rounds, []).append(index.tolist())
                optimizer.zero_grad()
                mean(mine, x, y, index).backward()
                optimizer.step()
        return flat(mine), seen

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).double()
    parameters, seen = zip(*run_on_threads(case, ranks, 60.0), strict=True)
    optimizer = sgd(model)
    for r, together in zip(sorted(seen[0]), union(seen), strict=True):
        optimizer.zero_grad()
        for group in zip(*(of_rank[r] for of_rank in seen), strict=True):
            index = [i for part in group for i in part]
            mean(model, X[index], Y[index], index, counts[together].sum()).backward()
        optimizer.step()
    require_same(torch.stack(parameters), flat(model))


def test_batch_norm_refuses_ranks_that_rest():
    def case(rank):
        SyncBatchNorm(3, balance=LoadBalance(LBBSP(may_rest=True), global_batch=BATCH), name="norm")

    with pytest.raises(ThreadRankError, match=r"lb-bsp.*SyncBatchNorm.*every rank"):
        run_on_threads(case, 2)


def test_a_gradient_scaler_skips_a_step_on_all_ranks_alike():
    model = dense()

    def case(rank):
        balance = LoadBalance("bsp", global_batch=BATCH)
        mine = copy.deepcopy(model)
        loader = BalancedLoader(TensorDataset(X, Y), balance)
        optimizer = DistributedOptimizer(sgd(mine), balance, mine.named_parameters())
        scaler = GradScaler("cpu", optimizer=optimizer, init_scale=8.0)
        scales = []
        for x, y in loader:
            infinite = rank == 1 and balance.rounds == 1
            scaler.scale(loss(mine, x, y) * (float("inf") if infinite else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return flat(mine), scales[:3]

    parameters, scales = zip(*run_on_threads(case, 2), strict=True)
    assert scales == ([8.0, 4.0, 4.0],) * 2
    assert torch.equal(*parameters)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("sync", ["d-psgd", "matcha"])
@pytest.mark.parametrize("policy", [BSP, lambda: LBNonBlocking(micro_batches=2)], ids=["bsp", "lb-non-blocking"])
def test_ranks_mix_with_their_neighbours_and_then_step(policy, sync, n):
    model = dense()

    def case(rank):
        balance = LoadBalance(policy(), global_batch=BATCH * n // 2, sync=sync)
        mine = copy.deepcopy(model)
        _, seen = train(mine, balance)
        return flat(mine), seen

    parameters, seen = zip(*run_on_threads(case, n), strict=True)
    models = [copy.deepcopy(model) for _ in range(n)]
    mixing = resolve_mixing(sync, n)
    for r, together in enumerate(union(seen)):
        mixed = torch.tensor(mixing.matrix(r)) @ torch.stack([flat(m) for m in models])
        for rank, m in enumerate(models):
            index = [i for part in seen[rank].get(r, []) for i in part]
            m.zero_grad()
            if index:
                loss(m, X[index], Y[index]).backward()
            share = n * len(index) / len(together)
            gradients = torch.cat(
                [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in m.parameters()]
            )
            torch.nn.utils.vector_to_parameters(mixed[rank] - 0.1 * share * gradients, m.parameters())
    torch.testing.assert_close(torch.stack(parameters), torch.stack([flat(m) for m in models]), rtol=0, atol=1e-10)
    assert not torch.equal(*parameters[:2])
    visited = sorted(i for of_rank in seen for parts in of_rank.values() for part in parts for i in part)
    assert visited == sorted([*range(SAMPLES)] * EPOCHS)


def test_local_updates_are_averaged_with_their_state():
    parameters, _ = on_threads(
        dense(), policy=lambda: ElasticBSP(4, updates="local"), make=lambda m: torch.optim.Adam(m.parameters(), lr=0.01)
    )
    assert (parameters == parameters[0]).all()


def test_several_optimizers_take_part_in_one_loop():
    models = [dense(), dense()]

    def case(rank):
        first = LoadBalance(StaticAllocation([3, 1, 2]), global_batch=BATCH)
        mine = copy.deepcopy(models)
        balances = [first, first.also()]
        optimizers = [
            DistributedOptimizer(sgd(m), b, m.named_parameters()) for m, b in zip(mine, balances, strict=True)
        ]
        seen = {}
        for x, y, index in BalancedLoader(TensorDataset(X, Y, torch.arange(SAMPLES)), first, shuffle=True, seed=2):
            seen.setdefault(first.rounds, []).append(index.tolist())
            for m, optimizer in zip(mine, optimizers, strict=True):
                optimizer.zero_grad()
                loss(m, x, y).backward()
            for optimizer in optimizers:
                optimizer.step()
        return [flat(m) for m in mine], seen

    parameters, seen = zip(*run_on_threads(case, 3), strict=True)
    for number, model in enumerate(models):
        require_same(torch.stack([of_rank[number] for of_rank in parameters]), single(model, seen))


def test_a_training_goes_on_from_its_saved_state():
    model = dense()

    def begin(mine, stop_at):
        balance = LoadBalance("lb-bsp", global_batch=BATCH)
        dataset = TensorDataset(X, Y, torch.arange(SAMPLES))
        loader = BalancedLoader(dataset, balance, shuffle=True, seed=2, stop_at=stop_at)
        return balance, loader, DistributedOptimizer(sgd(mine), balance, mine.named_parameters())

    def case(rank):
        mine, visited = copy.deepcopy(model), []
        balance, loader, optimizer = begin(mine, stop_at=2)
        for part in range(2):
            if part:
                state = balance.state_dict(), loader.state_dict()
                optimizer.close()
                balance, loader, optimizer = begin(mine, stop_at=None)
                balance.load_state_dict(state[0])
                loader.load_state_dict(state[1])
            for x, y, index in loader:
                visited += index.tolist()
                optimizer.zero_grad()
                loss(mine, x, y).backward()
                optimizer.step()
        return visited, balance.rounds

    visited, rounds = zip(*run_on_threads(case, 3), strict=True)
    assert sorted(itertools.chain(*visited)) == list(range(SAMPLES))
    assert rounds == (3, 3, 3)


def test_a_loop_by_steps_whose_body_does_what_belongs_to_an_update_is_that_of_one_process():
    """A schedule, an average of the weights and a collective in each step, which all ranks do equally often."""
    steps, model = 7, dense()
    weights = [copy.deepcopy(model) for _ in range(2)]

    def after_step(mine, average, optimizer):
        optimizer.param_groups[0]["lr"] *= 0.9
        for kept, new in zip(average.parameters(), mine.parameters(), strict=True):
            kept.data.lerp_(new.data, 0.5)

    def case(rank):
        mine, average = copy.deepcopy(weights)
        balance = LoadBalance(LBBSP(), global_batch=BATCH)
        loader = BalancedLoader(TensorDataset(X, Y, torch.arange(SAMPLES)), balance, shuffle=True, seed=2)
        optimizer = DistributedOptimizer(sgd(mine), balance, mine.named_parameters())
        assert len(loader.dataset) == SAMPLES
        batches, step, seen = iter(loader), 0, {}
        while step < steps:
            try:
                x, y, index = next(batches)
            except StopIteration:
                batches = iter(loader)
                continue
            seen[step] = [index.tolist()]
            loss(mine, x, y).backward()
            optimizer.step()
            after_step(mine, average, optimizer)
            average_by_samples({"rate": optimizer.param_groups[0]["lr"]}, len(x))
            step += 1
        assert balance.rounds == steps
        return flat(mine), flat(average), seen

    parameters, averages, seen = zip(*run_on_threads(case, 3), strict=True)
    alone, average = weights
    optimizer = sgd(alone)
    for index in union(seen):
        optimizer.zero_grad()
        loss(alone, X[index], Y[index]).backward()
        optimizer.step()
        after_step(alone, average, optimizer)
    require_same(torch.stack(parameters), flat(alone))
    require_same(torch.stack(averages), flat(average))


def test_figures_are_averaged_by_samples():
    means = run_on_threads(lambda rank: average_by_samples({"loss": float(rank)}, samples=rank), ranks=3)
    assert means == [{"loss": pytest.approx((1 + 4) / 3)}] * 3


def test_figures_travel_by_the_wire_of_a_balance():
    """Here each rank's own, in which it is alone."""

    def case(rank):
        balance = LoadBalance("bsp", global_batch=BATCH, wire=TorchThreadWire(Crew(1), 0))
        return average_by_samples(float(rank), 1, balance), average_by_samples(float(rank), 1)

    assert run_on_threads(case, ranks=2) == [(0.0, 0.5), (1.0, 0.5)]


def test_ranks_that_differ_are_stopped_on_every_rank():
    stopped = []

    def case(rank):
        balance, model = LoadBalance("bsp", global_batch=BATCH), dense()
        optimizer = DistributedOptimizer(sgd(model), balance, model.named_parameters())
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
        try:
            for x, y in BalancedLoader(TensorDataset(X, Y), balance):
                loss(model, x, y).backward()
                optimizer.step()
        except PlanMismatchError:
            stopped.append(rank)
            raise

    with pytest.raises(ThreadRankError, match=r"round 0: ranks \[1\].*hyper-parameters"):
        run_on_threads(case, ranks=2)
    assert sorted(stopped) == [0, 1]


def test_a_wire_can_be_given():
    def case(rank):
        wire = wire_here()
        return LoadBalance("bsp", global_batch=BATCH, wire=wire)._session.wire is wire

    assert run_on_threads(case, ranks=2) == [True, True]


def test_a_subclass_steps_on_a_rank_without_data_too():
    class Counting(DistributedOptimizer):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            return super().step(closure)

    model = dense()

    def rank(_):
        mine = copy.deepcopy(model)
        balance = LoadBalance(StaticAllocation([0, 1]), global_batch=BATCH)
        loader = BalancedLoader(TensorDataset(X, Y), balance)
        optimizer = Counting(sgd(mine), balance, mine.named_parameters())
        for x, y in loader:
            loss(mine, x, y).backward()
            optimizer.step()
        balance.close()
        return optimizer.steps

    assert run_on_threads(rank, 2) == [4, 4]
