"""Reads an iterable dataset, or shards of it, in this process or in workers: 64 samples of one lane after the other.

    lanes    [shard 0, shard 8, …]  [shard 1, shard 9, …]  …          each read from front to end, one shard at a time
    stream   64 of lane 0, 64 of lane 1, …, 64 of lane 0, …            without the lanes that have ended

The order is the same for any number of processes, if lanes are of shards: worker w of W has the lanes w, w + W, … and
takes as many turns as the others, empty ones where it has no lane. So a state of some processes suits others.
Each lane's state is that of its dataset after its last turn (``state_dict()``), or how many samples to pass over.
A stream's state holds those of all lanes, whose turn is next, and where the user's dataset stood at its front.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hvd_hetero.data.reading import Mark

LANES = 8  # shards that are open at once, and so the worker processes that have work (arbitrary)
_TURN_SAMPLES = 64  # handed over by a worker process at once (arbitrary; more costs memory)

State = dict[str, Any]
"""``of``: how many shards the dataset is cut into; 0: it shares itself out among the workers; 1: it is read whole."""


def lanes_of(dataset: IterableDataset[Any], workers: int) -> State:
    """Return the state at the front of a dataset that is read by so many worker processes (0: by this one)."""
    of = 1 if workers == 0 else shards_of(dataset)
    lanes = min(of, LANES) or workers
    return front(of, [list(range(lane, of or workers, lanes)) for lane in range(lanes)])


def front(of: int, shards: list[list[int]]) -> State:
    """Return the state before the first sample of lanes of these shards."""
    return {"of": of, "next": 0, "lanes": [{"shards": each, "pass_over": 0} for each in shards]}


def shards_of(dataset: Any) -> int:
    """Return the number of a dataset's shards, which ``shard()`` gives by number; 0 if it has none."""
    shards = getattr(dataset, "num_shards", 0) if callable(getattr(dataset, "shard", None)) else 0
    return shards if isinstance(shards, int) else 0


class Turns(IterableDataset[Any]):
    """Turns of the lanes of a state: the lane, and its samples with a mark at the end; as bytes from a worker."""

    def __init__(self, dataset: IterableDataset[Any], epoch: int, state: State) -> None:
        self.dataset = dataset
        self._epoch, self._state = epoch, state

    def __iter__(self) -> Iterator[Any]:
        worker, states = get_worker_info(), self._state["lanes"]
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        lanes = {i: self._lane(states[i], copies=worker is None) for i in range(first, len(states), step)}
        if worker is not None and self._state["of"]:
            # Lanes are shared out here, and a shard is not to be shared out again by those who would look.
            torch_worker._worker_info = None

        def turn(i: int) -> Iterator[Any]:
            for each in lanes.get(i, ()):
                yield each
                if isinstance(each, Mark):
                    return
            lanes.pop(i, None)

        begin = self._state["next"]
        while lanes:
            for i in range(first, first + step * -(-len(states) // step), step):
                samples = turn(i) if i >= begin else iter(())
                # As bytes: tensors from another process would each hold a file open until they are used.
                yield (i, samples) if worker is None else pickle.dumps((i, [*samples]), pickle.HIGHEST_PROTOCOL)
            begin = 0

    def _lane(self, state: State, *, copies: bool) -> Iterator[Any]:
        """Yield the samples of a lane, and after each turn, and at its end, a mark: its state."""
        taken = 0
        while state["shards"]:
            shard, *others = state["shards"]
            dataset = self._opened(shard, copies=copies)
            if "state" in state:
                dataset.load_state_dict(state["state"])
            samples, kept = iter(dataset), has_state(dataset)
            passed = sum(1 for _ in islice(samples, state["pass_over"]))
            if passed < state["pass_over"]:
                raise ValueError(
                    f"the state is of a stream with at least {state['pass_over']} samples in shard {shard}, this one "
                    f"has {passed}; resume with the same data"
                )
            for number, sample in enumerate(samples, passed + 1):
                yield sample
                taken += 1
                if taken % _TURN_SAMPLES == 0:
                    place = {"pass_over": 0, "state": dataset.state_dict()} if kept else {"pass_over": number}
                    yield Mark({"shards": [shard, *others], **place})
            state = {"shards": others, "pass_over": 0}
        yield Mark(state)

    def _opened(self, shard: int, *, copies: bool) -> Any:
        dataset: Any = self.dataset
        if self._state["of"] > 1:
            dataset = dataset.shard(num_shards=self._state["of"], index=shard)
        elif copies and has_state(dataset):
            # The user's own stays where it is: else its state would tell of samples that were only read ahead.
            dataset = _copy(dataset)
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(self._epoch)
        return dataset


def read(dataset: IterableDataset[Any], epoch: int, state: State, options: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the samples from a state on, and after each turn a mark; ``options`` are the DataLoader's."""
    workers = options["num_workers"]
    if state["of"] == 0 and len(state["lanes"]) != workers:
        raise ValueError(
            f"the state is of a stream that num_workers={len(state['lanes'])} processes share out by themselves, this "
            f"loader has num_workers={workers}; resume with the same, or give a dataset with num_shards and shard()"
        )
    if state["of"] > 1 and state["of"] != shards_of(dataset):
        raise ValueError(
            f"the state is of a stream with num_shards={state['of']}, this one has {shards_of(dataset)}; resume with "
            "the same data"
        )
    yield Mark(state)
    turns, lanes = Turns(dataset, epoch, state), list(state["lanes"])
    options = {**options, "num_workers": min(workers, len(lanes))}
    for turn in DataLoader(turns, batch_size=None, **options) if workers else turns:
        i, samples = pickle.loads(turn) if workers else turn
        for each in samples:
            if isinstance(each, Mark):
                lanes[i] = each.state
                yield Mark({**state, "next": i + 1, "lanes": list(lanes)})
            else:
                yield each


def begin_of(dataset: Any) -> Any:
    """Return the state in which a dataset that has one is to begin."""
    # Hugging Face's does not show, before its first sample, where it was told to begin.
    begins_at = getattr(dataset, "_starting_state_dict", None)
    return dataset.state_dict() if begins_at is None else begins_at


def has_state(dataset: Any) -> bool:
    """Whether a dataset can go on from its own state."""
    states = (getattr(dataset, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, states)) and not _has_a_buffer(dataset)


def _has_a_buffer(dataset: Any) -> bool:
    """Whether it is Hugging Face's with a shuffle buffer, whose samples are in no state of it."""
    inside = [
        each for name, each in getattr(dataset, "__dict__", {}).items() if name.lstrip("_").startswith("ex_iterable")
    ]
    parts = [part for each in inside for part in (each if isinstance(each, list) else [each])]
    return type(dataset).__name__ == "BufferShuffledExamplesIterable" or any(map(_has_a_buffer, parts))


def _copy(dataset: Any) -> Any:
    with suppress(RuntimeError):
        return copy.deepcopy(dataset)
    try:  # again: Hugging Face's holds a cache of file systems, which grows when the first one is copied
        return copy.deepcopy(dataset)
    except Exception as error:
        raise ValueError(
            f"a dataset with state_dict() is read from a copy, and {type(dataset).__name__} cannot be copied "
            f"({type(error).__name__}: {error}); give it __deepcopy__, or num_workers=1"
        ) from error
