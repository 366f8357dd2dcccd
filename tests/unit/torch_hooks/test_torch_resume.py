"""Training that is interrupted after any round goes on in a new job as if it had not been.

The clock moves with the samples computed and with nothing else: so plans that follow measured speeds are the same in
every run, and parameters can be compared bit by bit. For the same reason the processor and the memory that are read as
free, on which forecasts build, are always the same, and signals of rounds that end early come from a script.
"""

from __future__ import annotations

import time

import pytest
from clocks import ThreadClock

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402
from torch.utils.data import Dataset, IterableDataset  # noqa: E402

from hvd_hetero.measurement.readings import Resources  # noqa: E402
from hvd_hetero.policies import LBBSP, ElasticBSP, NonBlocking, SelfAdaptive  # noqa: E402
from hvd_hetero.session import balancer_of  # noqa: E402
from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance  # noqa: E402
from torch_hooks.wires.choice import wire_here  # noqa: E402

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once
ROUNDS, BATCH, SAMPLES, RANKS = 10, 12, 12 * 3 + 5, 2
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(SAMPLES, 5, generator=GENERATOR)
Y = X.sum(1, keepdim=True)
CLOCK = ThreadClock()


class SteadyMachine:
    """Takes the place of the meter of free processor and memory."""

    def __init__(self, clock):
        pass

    def read(self):
        return Resources(cpu=0.9 - 0.3 * wire_here().rank, memory=0.5)


class Script:
    """Rank 1 is told after one or two of its micro-batches that the round is over."""

    def __init__(self):
        self._asked = {}

    def raise_signal(self, round):
        pass

    def raised(self, round):
        self._asked[round] = self._asked.get(round, 0) + 1
        return wire_here().rank == 1 and self._asked[round] > round % 2


@pytest.fixture(autouse=True)
def script(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", CLOCK)
    monkeypatch.setattr("hvd_hetero.session.ResourceMeter", SteadyMachine)
    # A new job would not trust its first rounds again, and its plans would follow later than those of the other one.
    monkeypatch.setattr("hvd_hetero.measurement.speed_meter._WARM_UP_ROUNDS", 0)


class Samples(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return X[i], Y[i], i


class Stream(IterableDataset):
    """All samples in an order of each epoch's own, or each rank's part of them."""

    def __init__(self, step=1, first=0):
        self._step, self._first, self._epoch = step, first, 0

    def set_epoch(self, epoch):
        self._epoch = epoch

    def __iter__(self):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self._epoch)).tolist()
        return ((X[i], Y[i], i) for i in order[self._first :: self._step])


SHUFFLED = {"shuffle": True, "seed": 4}
LATE = 3, 8  # fewer stops, and late: each, and each epoch that follows one, forks workers again
EACH = range(1, ROUNDS)
CASES = {
    "self-adaptive": (lambda: SelfAdaptive(total=6, every=2), lambda: (Samples(), SHUFFLED), EACH),
    "elastic-bsp": (lambda: ElasticBSP(lookahead=3), lambda: (Samples(), SHUFFLED), EACH),
    "non-blocking": (lambda: NonBlocking(3), lambda: (Samples(), SHUFFLED), EACH),
    "lb-bsp, 2 workers": (lambda: LBBSP("narx"), lambda: (Samples(), SHUFFLED | {"num_workers": 2}), LATE),
    # Where what is left at the end of a pass makes a round only together with samples that are still to come back.
    "whole rounds": (
        lambda: NonBlocking(3), lambda: (Samples(), SHUFFLED | {"num_workers": 1, "drop_last": True}), LATE
    ),
    "whole stream": (lambda: NonBlocking(3), lambda: (Stream(), {"stream": "whole"}), LATE),
    "shards": (
        lambda: NonBlocking(3),
        lambda: (Stream(RANKS, wire_here().rank), {"stream": "shard", "rounds_per_epoch": 4}), LATE,
    ),
}  # fmt: skip


class Job:
    def __init__(self, case):
        policy, data, _ = CASES[case]
        dice = torch.Generator().manual_seed(0)  # of its own: loaders of other threads draw from the common one
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=dice) / 2
        self.balance = LoadBalance(policy(), global_batch=BATCH)
        if balancer_of(self.balance).signals is not None:
            balancer_of(self.balance).signals = Script()
        dataset, options = data()
        self.loader = BalancedLoader(dataset, self.balance, **options)
        adam = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.optimizer = DistributedOptimizer(adam, self.balance, self.model.named_parameters())
        self.parts = self.model, self.optimizer, self.balance, self.loader
        self.rounds, self._mine = [], []
        """epoch, plan and this rank's samples, of each round"""
        balancer_of(self.balance).observer = self._note

    def _note(self, finished):
        self.rounds.append((finished.epoch, finished.plan.samples, self._mine))
        self._mine = []

    def run(self, until):
        self.loader.stop_at = until
        while self.balance.rounds < until:
            for x, y, index in self.loader:
                self._mine += index.tolist()
                CLOCK.pass_s(1e-3 * len(x) * (1 + 2 * wire_here().rank))
                self.optimizer.zero_grad()
                functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
        return self

    def state(self):
        return [part.state_dict() for part in self.parts]

    def outcome(self):
        return self.rounds, [p.tolist() for p in self.model.parameters()]


@pytest.mark.parametrize("case", CASES)
def test_wherever_training_is_interrupted_rounds_and_parameters_are_the_same_bits(case, tmp_path):
    stops = CASES[case][2]

    def saves(rank):
        """A job of all rounds, and one that saves its state on the way."""
        whole, job = Job(case).run(ROUNDS), Job(case)
        for stop in stops:
            state = job.run(stop).state()
            if rank == 0:
                torch.save(state, tmp_path / f"{stop}.pt")
        assert job.run(ROUNDS).outcome() == whole.outcome(), "stopping to save changes nothing"
        return whole.outcome()

    def resumes(rank, stop):
        job = Job(case)
        for part, state in zip(job.parts, torch.load(tmp_path / f"{stop}.pt"), strict=True):
            part.load_state_dict(state)
        return job.run(ROUNDS).outcome()

    whole = run_on_threads(saves, RANKS)
    for stop in stops:
        resumed = run_on_threads(lambda rank, stop=stop: resumes(rank, stop), RANKS)
        for (rounds, end), (expected, expected_end) in zip(resumed, whole, strict=True):
            assert rounds == expected[stop:], f"after round {stop}"
            assert end == expected_end, f"after round {stop}"
    (first, _), (second, _) = whole
    plans = {tuple(plan) for _, plan, _ in first}
    if "bsp" in case or case == "self-adaptive":
        assert len(plans) > 2, "plans did change"
    else:
        early = zip(first, second, strict=True)
        assert sum(len(mine) + len(other) < sum(plan) for (_, plan, mine), (*_, other) in early) > 3, (
            "rounds ended early"
        )
    if case == "shards":
        return  # parts of the data, which go on from epoch to epoch
    for epoch in range(first[-1][0]):  # the last one is left in the middle
        visited = sorted(i for rounds in (first, second) for of, _, mine in rounds if of == epoch for i in mine)
        assert len(set(visited)) == len(visited)
        assert len(visited) == SAMPLES or (case == "whole rounds" and len(visited) > SAMPLES - BATCH)
