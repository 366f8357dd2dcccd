"""Streams of Hugging Face's datasets: they go on from their own state, in any number of processes, sample by sample."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
datasets = pytest.importorskip("datasets")
from datasets.distributed import split_dataset_by_node  # noqa: E402
from jobs_on_threads import Job, X, Y  # noqa: E402
from torch.utils.data import IterableDataset, get_worker_info  # noqa: E402

from hvd_hetero.data.reading import Reader  # noqa: E402
from hvd_hetero.policies import ElasticBSP, NonBlocking, StaticAllocation  # noqa: E402
from hvd_hetero.testing import ThreadRankError, run_on_threads  # noqa: E402
from torch_hooks.data.turns import lanes_of, read  # noqa: E402
from torch_hooks.wires.choice import wire_here  # noqa: E402

LENGTHS = [30, 200, 0, 77, 1, 64, 128, 65, 3, 90, 10]
SAMPLES = [(shard, i) for shard, length in enumerate(LENGTHS) for i in range(length)]


def shards(shards):
    for shard in shards:
        for i in range(LENGTHS[shard]):
            yield {"shard": shard, "i": i}


def stream():
    return datasets.IterableDataset.from_generator(shards, gen_kwargs={"shards": list(range(len(LENGTHS)))})


PIPELINES = {
    "map": lambda s: s.map(lambda x: x),
    "batched map": lambda s: s.map(lambda x: x, batched=True, batch_size=7),
    "filter": lambda s: s.filter(lambda x: x["i"] % 3 > 0),
    "take": lambda s: s.take(300),
    "skip": lambda s: s.skip(55),
    "interleave": lambda s: datasets.interleave_datasets([s, stream()]),
    "shuffle": lambda s: s.shuffle(seed=1, buffer_size=50),
    "map of shuffle": lambda s: s.shuffle(seed=1, buffer_size=50).map(lambda x: x),
}


def reader(dataset, workers, place=None, epoch=0):
    options = {"num_workers": workers, "prefetch_factor": 2 if workers else None}

    def samples(state):
        return read(dataset, epoch, lanes_of(dataset, workers) if state is None else state, options)

    return Reader(samples, place)


def numbers(found):
    return [(sample["shard"], sample["i"]) for _, sample in found]


@pytest.mark.parametrize(("workers", "then"), [(0, 0), (0, 2), (2, 3), (3, 0)])
def test_any_number_of_processes_goes_on_from_any_other_with_the_same_samples(workers, then):
    whole = numbers(reader(stream(), workers).read(10**6))
    assert sorted(whole) == SAMPLES
    assert workers or whole == SAMPLES
    for stop in (5, 64, 400):
        first = reader(stream(), workers)
        done = numbers(first.read(stop))[:-3]
        place = json.loads(json.dumps(first.state_dict(range(stop - 3, stop))))
        assert stop - 3 - place["mark"][0] <= 64 + 3, "read again"
        assert done + numbers(reader(stream(), then, place).read(10**6)) == whole


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("epoch", [0, 3])
def test_no_sample_of_a_pipeline_is_lost_where_it_goes_on(pipeline, epoch):
    """A shuffle buffer is in no state, so such a stream is read again from its front."""

    def made():
        return PIPELINES[pipeline](stream())

    whole = numbers(reader(made(), 0, epoch=epoch).read(10**6))
    for stop in (70, 150, 290):
        first = reader(made(), 0, epoch=epoch)
        done, place = numbers(first.read(stop)), first.state_dict(())
        assert done + numbers(reader(made(), 0, place, epoch=epoch).read(10**6)) == whole
        (lane,) = place["mark"][1]["lanes"]
        assert ("state" in lane) == (lane["pass_over"] == 0) == ("shuffle" not in pipeline)


class Counting(IterableDataset):
    """A stream that torchdata's StatefulDataLoader would keep: processes share it out by themselves."""

    def __init__(self, samples=200):
        self.samples, self.at = samples, 0

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, self.samples, step):
            if i >= self.at:
                self.at = i + 1
                yield {"shard": 0, "i": i}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_stream_that_processes_share_out_by_themselves_goes_on_in_as_many():
    whole = numbers(reader(Counting(), 2).read(10**6))
    for stop in (10, 150):
        first = reader(Counting(), 2)
        done, place = numbers(first.read(stop)), first.state_dict(())
        assert done + numbers(reader(Counting(), 2, place).read(10**6)) == whole
    with pytest.raises(ValueError, match=r"num_workers=2.*num_workers=0.*resume"):
        reader(Counting(), 0, place).read(1)


def test_a_worker_s_own_function_finds_the_user_s_dataset():
    def half(worker):
        get_worker_info().dataset.samples = 100

    def case(rank):
        return trained(job(Counting(), stream="whole", worker_init_fn=half, num_workers=1))

    assert run_on_threads(case, 1) == [list(range(100))]


def job(data, policy=None, **options):
    def collate(samples):
        index = [sum(LENGTHS[: each["shard"]]) + each["i"] for each in samples]
        return X[torch.tensor(index) % len(X)], Y[torch.tensor(index) % len(X)], index

    ranks = wire_here().size
    return Job(policy or StaticAllocation([3, 1, 2][:ranks]), data=data, batch=24, collate_fn=collate, **options)


def trained(made, rounds=None):
    seen = []
    made.loader.stop_at = rounds
    for x, y, index in made.loader:
        made.optimizer.zero_grad()
        made.loss(x, y).backward()
        made.optimizer.step()
        seen += index
    return seen


@pytest.mark.parametrize("first", ["stream", "loader", "loader alone"])
@pytest.mark.parametrize("make", [stream, Counting], ids=["datasets", "torchdata"])
def test_stream_and_loader_may_be_restored_in_either_order(first, make):
    made_before = [(make(), make()) for _ in range(3)]  # copies of them share a cache of datasets
    elsewhere = make()
    for _ in zip(range(50), elsewhere, strict=False):
        pass
    moved = elsewhere.state_dict()

    def case(rank):
        data, restored = made_before[rank]
        made = job(data, stream="whole")
        before = trained(made, 4)
        states = made.balance.state_dict(), made.loader.state_dict(), moved
        again = job(restored, stream="whole")
        again.balance.load_state_dict(states[0])
        if first == "stream":
            restored.load_state_dict(states[2])
        again.loader.load_state_dict(states[1])
        if first == "loader":
            restored.load_state_dict(states[2])
        return before + trained(again), trained(again)

    for epoch in zip(*run_on_threads(case, 3), strict=True):
        seen = sorted(i for part in epoch for i in part)
        assert seen == list(range(len(SAMPLES) if make is stream else 200))


def test_the_state_of_a_stream_alone_loses_nothing():
    made_before = [(stream(), stream()) for _ in range(3)]

    def case(rank):
        data, restored = made_before[rank]
        trained(job(data, stream="whole"), 4)
        again = job(restored, stream="whole")
        restored.load_state_dict(data.state_dict())
        return trained(again)

    assert sorted(i for part in run_on_threads(case, 3) for i in part) == list(range(len(SAMPLES)))


@pytest.mark.parametrize(("ranks", "workers"), [(3, 0), (2, 1), (1, 2)])
def test_shards_are_handed_out_again_to_other_ranks_and_processes(ranks, workers):
    def before(rank):
        made = job(stream(), stream="shard")
        seen = trained(made, 12)
        return seen, made.loader.state_dict()

    def after(rank):
        options = {"num_workers": workers, "prefetch_factor": 2 if workers else None}
        again = job(stream(), stream="shard", **options)
        again.loader.load_state_dict(state)
        return trained(again)

    first = run_on_threads(before, 3)
    state = json.loads(json.dumps(first[0][1]))
    assert all(json.dumps(each) == json.dumps(first[0][1]) for _, each in first)
    done = [i for seen, _ in first for i in seen] + [i for seen in run_on_threads(after, ranks) for i in seen]
    assert sorted(done) == list(range(len(SAMPLES)))


@pytest.mark.parametrize(
    ("policy", "sync"),
    [(lambda: NonBlocking(2), "allreduce"), (lambda: NonBlocking(2), "d-psgd"), (ElasticBSP, "allreduce")],
    ids=["early", "early, d-psgd", "elastic"],
)
def test_shards_go_with_rounds_of_any_kind(policy, sync):
    def case(rank):
        return trained(job(stream(), policy(), stream="shard", balance={"sync": sync}))

    assert sorted(i for part in run_on_threads(case, 3) for i in part) == list(range(len(SAMPLES)))


def test_a_dataset_that_was_split_by_node_is_not_split_again():
    split = split_dataset_by_node(stream(), 0, 2)
    with pytest.raises(ThreadRankError, match=r"split_dataset_by_node.*leave that out"):
        run_on_threads(lambda rank: job(split, stream="shard"), 1)
