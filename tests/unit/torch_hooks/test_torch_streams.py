"""Iterable datasets: whole streams are dealt like data with random access, shards go on for ever.

That whole streams are exact and visited once under every policy is in the array of pairs.
"""

from __future__ import annotations

import re
import resource
import time

import pytest

torch = pytest.importorskip("torch")
from jobs_on_threads import Job, X, Y, told  # noqa: E402
from torch.utils.data import Dataset, IterableDataset, get_worker_info  # noqa: E402

from hvd_hetero.policies import BSP, ElasticBSP, NonBlocking, StaticAllocation  # noqa: E402
from hvd_hetero.session import balancer_of  # noqa: E402
from hvd_hetero.testing import run_on_threads  # noqa: E402

SAMPLES, BATCH = 131, 24
POLICIES = {"bsp": BSP, "static": lambda: StaticAllocation([3, 1, 2]), "non-blocking": lambda: NonBlocking(2)}


def sample(i):
    return X[i % len(X)], Y[i % len(X)], i


class Stream(IterableDataset):
    """Samples of this rank's numbers; worker processes share them."""

    def __init__(self, numbers=range(SAMPLES), make=sample):
        self.numbers, self.make = numbers, make

    def __iter__(self):
        info = get_worker_info()
        numbers = self.numbers if info is None else self.numbers[info.id :: info.num_workers]
        return map(self.make, numbers)


class Samples(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return sample(i)


def trained(job, epochs=2):
    """The samples that this rank saw, by epoch."""
    seen = []
    for epoch in range(epochs):
        job.loader.set_epoch(epoch)
        seen.append([])
        for x, y, index in job.loader:
            job.optimizer.zero_grad()
            job.loss(x, y).backward()
            job.optimizer.step()
            seen[-1] += index.tolist()
    return seen


def on_threads(policy=BSP, batch=BATCH, **options):
    """What three ranks saw, and the rounds that they did."""

    def case(rank):
        job = Job(policy(), batch=batch, **{"data": Stream(), "stream": "whole"} | options)
        return trained(job), job.balance.rounds

    return zip(*run_on_threads(case, 3), strict=True)


def test_a_whole_stream_is_dealt_as_random_access_is():
    assert [*on_threads(POLICIES["static"])] == [*on_threads(POLICIES["static"], data=Samples(), stream=None)]


def test_worker_processes_read_a_stream():
    seen, _ = on_threads(num_workers=2)
    assert sorted(i for rank in seen for i in rank[0]) == list(range(SAMPLES))


def test_drop_last_leaves_the_end_of_a_stream_out():
    seen, rounds = on_threads(drop_last=True)
    assert sorted(i for rank in seen for i in rank[1]) == list(range(120))
    assert rounds == (10,) * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_shard_is_visited_in_order_and_begins_again(policy):
    def case(rank):
        mine = range(rank, SAMPLES, 3)
        job = Job(POLICIES[policy](), batch=BATCH, data=Stream(mine), stream="shard", rounds_per_epoch=7)
        first, second = trained(job)
        visited = first + second
        assert visited == ([*mine] * 10)[: len(visited)]
        return job.balance.rounds

    assert run_on_threads(case, 3) == [14] * 3


def test_samples_that_wait_hold_no_files_open():
    """A round of more tensors, each with memory of its own, than a process may have files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        owned = Stream(range(600), lambda i: (X[i % len(X)].clone(), Y[i % len(X)].clone(), i))
        (seen,) = run_on_threads(
            lambda rank: trained(Job(data=owned, batch=400, stream="whole", num_workers=1), epochs=1), 1
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sorted(seen[0]) == list(range(600))


def test_a_loop_that_is_left_and_another_loader_in_between_lose_and_repeat_nothing():
    """A loop left right after a step, and two loaders of one training: what is done is done, the rest comes back."""

    def case(rank):
        mine = range(rank, SAMPLES, 3)
        job = Job(data=Stream(mine), batch=6, stream="shard", rounds_per_epoch=9)
        other = type(job.loader)(Samples(), job.balance)
        seen = []
        for _ in range(3):
            for loader, batches, found in ((job.loader, 2, seen), (other, 3, [])):
                for number, (x, y, index) in enumerate(loader, 1):
                    job.optimizer.zero_grad()
                    job.loss(x, y).backward()
                    job.optimizer.step()
                    found.extend(index.tolist())
                    if number == batches:
                        break
        assert seen == [*mine][:12]
        return [place["until"] - len(place["left"]) for *_, place in job.loader.state_dict()["order"]["parts"]]

    assert run_on_threads(case, 3) == [[12] * 3] * 3


def test_waiting_for_what_others_read_is_no_waiting_for_data():
    def slow(i):
        time.sleep(0.02)
        return sample(i)

    def case(rank):
        job = Job(data=Stream(range(40), slow if rank else sample), batch=8, stream="shard")
        input_s = 0.0
        for x, y, _ in job.loader:
            job.optimizer.zero_grad()
            job.loss(x, y).backward()
            job.optimizer.step()
            input_s += balancer_of(job.balance).finished.table.column("input_s")
        return input_s

    for fast, slow_s in run_on_threads(case, 2):
        assert slow_s > 20 * 0.02
        assert fast < slow_s / 3


def whole(numbers, policy=BSP, **options):
    """A stream whose length, or whose number of readers, is another one on rank 1."""

    def case(rank):
        given = {name: value + (rank == 1) for name, value in options.items() if name == "num_workers"}
        trained(Job(policy(), batch=BATCH, data=Stream(numbers(rank == 1)), stream="whole", **options | given))

    return case


def shards_of_unequal_epochs(rank):
    trained(Job(batch=BATCH, data=Stream(), stream="shard", rounds_per_epoch=3 + rank))


@pytest.mark.parametrize(
    "case",
    [
        whole(lambda uneven: range(48 + 24 * uneven)),
        whole(lambda uneven: range(29 + 25 * uneven), drop_last=True),
        whole(lambda uneven: range(24 * (4 + uneven)), lambda: ElasticBSP(lookahead=3)),
        whole(lambda uneven: range(96), num_workers=1),
        shards_of_unequal_epochs,
    ],
    ids=["longer", "longer, dropping", "elastic", "readers", "rounds"],
)
def test_a_stream_that_ends_alone_is_found_out_before_a_rank_waits_for_one_that_has_gone(case):
    for said in told(case, 3):
        assert re.match(r"PlanMismatchError: round \d+: ranks .* follow another plan", said)
