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
from collections.abc import Callable, Iterator, Mapping
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
    """Turns of the lanes of a state: their samples, and the lane, or both as bytes from a worker."""

    def __init__(self, dataset: IterableDataset[Any], epoch: int, state: State) -> None:
        self.dataset = dataset
        self._epoch, self._state = epoch, state

    def __iter__(self) -> Iterator[Any]:
        worker, states = get_worker_info(), self._state["lanes"]
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self._copies = worker is None
        lanes = {i: _Lane(self._opened, states[i]) for i in range(first, len(states), step)}
        if worker is not None and self._state["of"]:
            # Lanes are shared out here, and a shard is not to be shared out again by those who would look.
            torch_worker._worker_info = None
        begin = self._state["next"]
        while any(lane.shards for lane in lanes.values()):
            for i in range(first, first + step * -(-len(states) // step), step):
                lane = lanes.get(i) if i >= begin else None
                turn = iter(()) if lane is None else lane.turn()
                if worker is None:
                    yield i, turn, lane
                else:  # as bytes: tensors from another process would each hold a file open until they are used
                    yield pickle.dumps((i, [*turn], lane and lane.state_dict()), pickle.HIGHEST_PROTOCOL)
            begin = 0

    def _opened(self, shard: int) -> Any:
        dataset: Any = self.dataset
        if self._state["of"] > 1:
            dataset = dataset.shard(num_shards=self._state["of"], index=shard)
        elif self._copies and has_state(dataset):
            # The user's own stays where it is: else its state would tell of samples that were only read ahead.
            dataset = _copy(dataset)
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(self._epoch)
        return dataset


class _Lane:
    """Shards of a dataset, one after the other. A state without ``state`` is that of the front of its first shard."""

    def __init__(self, opened: Callable[[int], Any], state: Mapping[str, Any]) -> None:
        self.shards: list[int] = list(state["shards"])
        self._opened = opened
        self._state = dict(state)
        self._dataset: Any = None
        self._samples: Iterator[Any] | None = None

    def turn(self) -> Iterator[Any]:
        """Yield the samples of a turn."""
        taken = 0
        while self.shards and taken < _TURN_SAMPLES:
            if self._samples is None:
                self._samples = self._open()
            for sample in islice(self._samples, _TURN_SAMPLES - taken):
                taken += 1
                self._state["pass_over"] += 1
                yield sample
            if taken < _TURN_SAMPLES:
                del self.shards[0]
                self._samples = None
                self._state = {"pass_over": 0}
        if self._samples is not None and has_state(self._dataset):
            self._state = {"pass_over": 0, "state": self._dataset.state_dict()}

    def state_dict(self) -> State:
        """Return where this lane stands, as plain data."""
        return self._state | {"shards": list(self.shards)}

    def _open(self) -> Iterator[Any]:
        self._dataset = self._opened(self.shards[0])
        if "state" in self._state:
            self._dataset.load_state_dict(self._state["state"])
        samples: Iterator[Any] = iter(self._dataset)
        passed = sum(1 for _ in islice(samples, self._state["pass_over"]))
        if passed < self._state["pass_over"]:
            raise ValueError(
                f"the state is of a stream with at least {self._state['pass_over']} samples in shard {self.shards[0]}, "
                f"this one has {passed}; resume with the same data"
            )
        return samples


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
        i, samples, lane = pickle.loads(turn) if workers else turn
        if lane is None:
            continue
        yield from samples
        lanes[i] = lane.state_dict() if isinstance(lane, _Lane) else lane
        yield Mark({**state, "next": i + 1, "lanes": list(lanes)})


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
