"""Samplers of the user: drawn alike whatever the state of a rank's generators, each drawn index once."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

hvd = pytest.importorskip("horovod.torch")
import torch  # noqa: E402 - imported by Horovod if it is there
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hvd_hetero.policies import BSP  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance  # noqa: E402
from torch_hooks.data.samplers import drawn_by  # noqa: E402

SAMPLES, BATCH = 30, 8
DATA = TensorDataset(torch.arange(SAMPLES))


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


class ByPython(Sampler):
    """From Python's and NumPy's generators."""

    def __iter__(self):
        order = list(range(SAMPLES))
        random.shuffle(order)
        return iter(np.random.permutation(order))


class Buckets:
    """Lists of neighbours, in an order of their own in every epoch; it keeps count of the epochs itself."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        lists = [list(range(begin, min(begin + BATCH, SAMPLES))) for begin in range(0, SAMPLES, BATCH)]
        np.random.default_rng(self.epoch).shuffle(lists)
        return iter(lists)


def seed_all(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def own_generator():
    return torch.Generator().manual_seed(random.randrange(2**32))


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), 20),
    "weighted, own generator": lambda: WeightedRandomSampler(
        torch.arange(1.0, SAMPLES + 1), 40, generator=own_generator()
    ),
    "random": lambda: RandomSampler(DATA),
    "subset": lambda: SubsetRandomSampler([3, 1, 4, 15, 9, 2, 6], generator=own_generator()),
    "python": ByPython,
}
BATCH_SAMPLERS = {
    "batches": lambda: BatchSampler(RandomSampler(DATA, generator=own_generator()), 5, drop_last=False),
    "buckets": Buckets,
}


def visited(state=None, saves=(), **options):
    """The indices of each round, and the states asked for."""
    model = torch.nn.Linear(1, 1)
    balance = LoadBalance(BSP(max_micro_batch=3), global_batch=BATCH)
    loader = BalancedLoader(DATA, balance, seed=3, **options)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), balance, model.named_parameters())
    if state is not None:
        loader.load_state_dict(state)
    rounds, states = {}, {}
    for _ in range(2):
        for (index,) in loader:
            rounds.setdefault((loader.epoch, balance.rounds), []).extend(index.tolist())
            model(index[:, None].float()).sum().backward()
            optimizer.step()
            if balance.rounds in saves and balance.round_complete:
                states[balance.rounds] = loader.state_dict()
    return list(rounds.values()), states


@pytest.mark.parametrize("name", [*SAMPLERS, *BATCH_SAMPLERS])
def test_ranks_whose_generators_differ_draw_alike_and_visit_each_index_once(name):
    """As two ranks would that started apart: two trainings of one rank each."""
    made, option = (SAMPLERS[name], "sampler") if name in SAMPLERS else (BATCH_SAMPLERS[name], "batch_sampler")
    ends = []
    for rank in range(2):
        seed_all(rank)
        ends.append(visited(**{option: made()})[0])
    assert ends[0] == ends[1]
    draw = drawn_by(made(), 3, in_batches=option == "batch_sampler")
    wanted = Counter([*draw(0).tolist(), *draw(1).tolist()])
    assert Counter(i for round in ends[0] for i in round) == wanted
    assert draw(0).tolist() != draw(1).tolist()


def test_lists_of_a_global_batch_stay_together():
    rounds = visited(batch_sampler=Buckets())[0]
    short = SAMPLES % BATCH
    whole = [sorted(round) for round in rounds if len(round) == BATCH and SAMPLES - short not in round]
    assert len(whole) >= 3
    assert sum(round == list(range(round[0], round[0] + BATCH)) for round in whole) >= 3


def test_drawing_leaves_the_generators_as_they_were():
    seed_all(5)
    expected = torch.rand(1).item(), random.random(), np.random.random()
    seed_all(5)
    drawn_by(RandomSampler(DATA), 0, in_batches=False)(0)
    drawn_by(ByPython(), 0, in_batches=False)(0)
    assert (torch.rand(1).item(), random.random(), np.random.random()) == expected


def test_an_epoch_goes_on_from_a_state_also_of_a_sampler_that_never_draws_the_same_again():
    class Another(Sampler):
        def __iter__(self):
            return iter(np.random.default_rng().permutation(SAMPLES).tolist())

    rounds, states = visited(sampler=Another(), saves=(2,))
    rest = visited(sampler=Another(), state=states[2])[0]
    assert rest[:2] == rounds[2:4]
