"""What ranks send each other beside dense gradients, on ranks that are threads, compared with one process."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from jobs_on_threads import told  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from hvd_hetero.communication.thread_wire import ThreadGroup  # noqa: E402
from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, LBNonBlocking, StaticAllocation  # noqa: E402
from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import (  # noqa: E402
    BalancedLoader,
    DistributedOptimizer,
    LoadBalance,
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


def on_threads(model, ranks=3, policy=lambda: StaticAllocation([3, 1, 2]), data=X, make=sgd, **options):
    """Train copies of the model; returns every rank's parameters and samples."""

    def case(rank):
        balance = LoadBalance(policy(), global_batch=BATCH)
        mine = copy.deepcopy(model)
        return train(mine, balance, make, data, **options)

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


class Rows(torch.nn.Module):
    """Nothing but sparse parameters, for the optimizer that takes no others."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.EmbeddingBag(5, 1, mode="sum", sparse=True)

    def forward(self, words):
        return self.words(words)


def sparse_adam(model):
    return torch.optim.SparseAdam(list(model.parameters()), lr=0.05)


@pytest.mark.parametrize(
    ("kind", "policy", "make", "options"),
    [
        (Bag, lambda: StaticAllocation([0, 3, 1]), sgd, {}),
        (Bag, lambda: LBNonBlocking(micro_batches=2), sgd, {}),
        (Bag, lambda: BSP(max_micro_batch=1), lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1), {}),
        (Bag, BSP, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), {"sparse_as_dense": True}),
        (Rows, lambda: ElasticBSP(lookahead=2), sparse_adam, {}),
        (Rows, BSP, sparse_adam, {"sparse_as_dense": True}),
    ],
)
def test_rows_of_sparse_gradients_are_those_of_one_process(kind, policy, make, options):
    """Whoever has rows and whoever has none: the first case has a rank without data."""
    model, layouts = kind().double(), set()

    def watched(mine):
        optimizer = make(mine)
        optimizer.register_step_pre_hook(lambda *_: layouts.update(p.grad.layout for p in mine.parameters()))
        return optimizer

    parameters, seen = on_threads(model, policy=policy, data=WORDS, make=watched, **options)
    if make is not sparse_adam:  # which is given rows whatever travels
        assert (torch.sparse_coo in layouts) == (not options), "they stay sparse"
    require_same(parameters, single(model, seen, make, WORDS))


@pytest.mark.parametrize("sync", ["allreduce", "d-psgd"])
def test_local_updates_and_neighbour_averaging_train_embeddings_too(sync):
    start = Rows().double()

    def case(rank):
        model = copy.deepcopy(start)
        policy = ElasticBSP(lookahead=2, updates="local") if sync == "allreduce" else StaticAllocation([0, 3, 1])
        train(model, LoadBalance(policy, global_batch=BATCH, sync=sync), sparse_adam, WORDS)
        return float(loss(model, WORDS, Y).detach())

    assert max(run_on_threads(case, 3)) < float(loss(start, WORDS, Y).detach())


def test_a_layout_that_changes_after_the_first_rounds_is_converted_and_unlike_ones_are_refused_on_all_ranks():
    def trained(rank, layouts):
        table = torch.nn.Embedding(6, 2, sparse=layouts[0]).double()
        torch.nn.init.constant_(table.weight, 0.5)
        balance = LoadBalance("bsp", global_batch=2)
        optimizer = DistributedOptimizer(sgd(table), balance)
        for step, sparse in enumerate(layouts):
            table.sparse = sparse
            balance.batch(1)
            optimizer.zero_grad()
            (table(torch.tensor([rank + step])) ** 2).sum().backward()
            optimizer.step()
        return flat(table)

    dense, *others = (
        run_on_threads(lambda rank, of=of: trained(rank, of), 2)[0]
        for of in ([False] * 4, [False, False, True, True], [True, True, False, False])
    )
    for other in others:
        torch.testing.assert_close(other, dense, rtol=0, atol=1e-15)
    for said in told(lambda rank: trained(rank, [rank == 0])):
        assert "'group0.0' is sparse on one rank and dense on another" in said
        assert "sparse_as_dense=True" in said


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


def test_figures_travel_by_the_wire_of_a_balance():
    """Here each rank's own, in which it is alone."""

    def case(rank):
        balance = LoadBalance("bsp", global_batch=BATCH, wire=TorchThreadWire(ThreadGroup(1), 0))
        return average_by_samples(float(rank), 1, balance), average_by_samples(float(rank), 1)

    assert run_on_threads(case, ranks=2) == [(0.0, 0.5), (1.0, 0.5)]


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
