"""Evaluation: each rank does the part of a dataset that its speed allows, and one collective joins their figures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hvd_hetero.averages import Numbers, Part, averages, joined
from hvd_hetero.checks import integer
from hvd_hetero.data.same_data import ranks_with_other_data
from hvd_hetero.errors import HeteroError, PlanMismatchError
from hvd_hetero.session import LoadBalanceBase
from torch_hooks.data.contents import shown
from torch_hooks.data.counting import Weights
from torch_hooks.data.samplers import random_state_kept
from torch_hooks.data.workers import EndsWithRank
from torch_hooks.session import TorchSession
from torch_hooks.wires.choice import wire_here

Values = TypeVar("Values", float, torch.Tensor, Mapping[str, float | torch.Tensor])
Found = TypeVar("Found")

logger = logging.getLogger(__name__)


class EvaluationLoader:
    """Yields this rank's part of a dataset to evaluate; each sample goes to one rank, in the dataset's order.

    The parts are in proportion to the speeds of the ranks (``hvd_hetero.evaluation``). For a
    validation loop that sums over ranks by itself, such as Lightning's; ``balance.evaluate`` does the rest, too.

    Without a ``DistributedOptimizer`` layers of yours may wait for other ranks, as FSDP2's do. All ranks then get
    equally many batches, of unequal size, and a dataset of fewer samples than ranks goes whole to each of them. It has
    no ``len()``: the number of batches changes with the speeds.

    ``batch_size``: the largest batch on any rank; None: as many samples as a micro-batch of training has at equal
    shares, and no more than ``max_micro_batch`` of any rank. Other options are the ``DataLoader``'s: ``collate_fn``,
    ``num_workers``, ``pin_memory`` and so on.
    """

    def __init__(
        self, dataset: Dataset[Any], balance: LoadBalanceBase, batch_size: int | None = None, **loader_options: Any
    ) -> None:
        if not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
            raise ValueError(
                f"dataset must have __len__ and __getitem__ to be evaluated in parts, and {type(dataset).__name__} has "
                "not; give the dataset of a DataLoader, and iterate over a part of a stream on each rank, with "
                "average_by_samples at the end"
            )
        self.dataset = dataset
        """The dataset, as given."""
        self._session = cast(TorchSession, balance._session)
        planner = self._session.balancer.planner
        if batch_size is None:
            each = planner.global_batch // (planner.workers * max(planner.room.least, 1))
            batch_size = max(int(min(planner.typical_size, each, planner.room.user_bounds.min())), 1)
        self._batch_size = integer(
            "batch_size", batch_size, 1, remedy="give the samples that a forward pass has memory for"
        )
        loader_options["worker_init_fn"] = EndsWithRank(loader_options.get("worker_init_fn"))
        self._options = loader_options

    @property
    def repeats(self) -> bool:
        """Whether every rank gets the whole dataset, which is too small to be divided."""
        return self._in_step and len(cast(Sized, self.dataset)) < self._session.balancer.workers

    @property
    def counts(self) -> bool:
        """Whether what this rank evaluates counts: no other one does so."""
        return not (self.repeats and self._session.balancer.rank)

    @property
    def _in_step(self) -> bool:
        return self._session.optimizer is None

    def batches(self) -> list[list[int]]:
        """Return the indices of this rank's batches, by the speeds of now."""
        samples, balancer = len(cast(Sized, self.dataset)), self._session.balancer
        if self.repeats:
            return [list(range(i, min(i + self._batch_size, samples))) for i in range(0, samples, self._batch_size)]
        plan = self._session.evaluation.plan(samples)
        plan = plan.with_equal_counts(largest=self._batch_size) if self._in_step else plan.within(self._batch_size)
        self._plan = plan
        ends = accumulate(plan.sizes(balancer.rank), initial=plan.start(balancer.rank))
        return [list(range(begin, end)) for begin, end in pairwise(ends)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read(self.batches()))

    def read(self, batches: list[list[int]]) -> DataLoader[Any]:
        """Return a loader of these batches."""
        # With a generator of its own: a DataLoader draws the seed of its workers from that of training.
        return DataLoader(self.dataset, batch_sampler=batches, generator=torch.Generator(), **self._options)

    def on_all_ranks(self, part: Callable[[], Found]) -> list[Found]:
        """Return what ``part``, which iterates over this loader, returns on each rank, and learn from its seconds.

        One collective. If it fails on one rank, all raise, at the end of their own parts; and if ranks hold datasets
        that differ. The random state, and what is measured of a round under way, stay as they are.
        """
        session, size = self._session, len(cast(Sized, self.dataset))
        rows = shown(self.dataset) if size else (0, {})
        failure: Exception | None = None
        found, began_at = None, time.perf_counter()
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with random_state_kept(devices), session.meter.left_out():
            try:
                with torch.no_grad():
                    found = part()
            except Exception as error:
                failure = error
                # Ranks that wait for this one in a layer, as FSDP2's do, never come to where all raise.
                logger.exception("this rank failed in an evaluation, and waits for the end of the others' parts")
            said = None if failure is None else f"{type(failure).__name__}: {failure}"
            mine = said, time.perf_counter() - began_at, rows, found
            with session.joining():
                parts = session.wire.allgather_object(mine, name=f"{session.prefix}.evaluation")
        failures, seconds, everywhere, results = zip(*parts, strict=True)
        if failure is not None:
            raise failure
        if failed := [(rank, what) for rank, what in enumerate(failures) if what is not None]:
            raise HeteroError(f"rank {failed[0][0]} failed in an evaluation: {failed[0][1]}. Its log shows where")
        others = [rank for rank, (length, _) in enumerate(everywhere) if length != everywhere[0][0]]
        if others := others or ranks_with_other_data(everywhere):
            raise PlanMismatchError(
                f"ranks {others} hold other samples to evaluate than rank 0. Give every rank the whole dataset, which "
                "is divided here, or evaluate a part of its own on each rank and call average_by_samples"
            )
        if not self.repeats:
            session.evaluation.learn(self._plan, seconds)
        return list(results)


class Figures(dict[str, Any]):
    """Means over what all ranks have evaluated, by name, the same bits on every rank."""

    def __init__(self, weight: float, sums: Mapping[str, Numbers]) -> None:
        self.weight = weight
        """The samples, or what ``weight_of`` counts, over all ranks."""
        self.sums = {name: _plain(value) for name, value in sums.items()}
        super().__init__({name: _plain(value / weight) for name, value in sums.items()})


def evaluated(loader: EvaluationLoader, function: Callable[[Any], Mapping[str, Any]], weight_of: Any) -> Figures:
    """Return the means of a function of a batch over the dataset of a loader; a collective call."""

    def part() -> Part:
        batches, weigh, whole, found = loader.batches(), Weights(weight_of), 0.0, dict[str, Numbers]()
        first: dict[str, Any] = {}
        for indices, batch in zip(batches, loader.read(batches), strict=True):
            values = function(batch)
            if not isinstance(values, Mapping):
                raise TypeError(
                    f'the function must return means by name, such as {{"loss": loss}}, got {type(values).__name__}'
                )
            numbers = {name: np.asarray(torch.as_tensor(v).detach().cpu().double()) for name, v in values.items()}
            shapes = {name: value.shape for name, value in numbers.items()}
            if shapes != (first := first or shapes):
                raise ValueError(
                    f"the function must return the same names and shapes for every batch, got {shapes} after {first}; "
                    "return means over the samples of the batch"
                )
            weight = float(len(indices) if (count := weigh(batch, len(indices))) is None else count) * loader.counts
            if weight > 0.0:  # a mean over no tokens is NaN
                found = {name: found.get(name, 0.0) + weight * value for name, value in numbers.items()}
                whole += weight
        return whole, found

    return Figures(*joined(loader.on_all_ranks(part)))


def average_by_samples(values: Values, samples: float, balance: LoadBalanceBase | None = None) -> Values:
    """Return ``sum_i n_i v_i / sum_i n_i`` over the ranks, with rank i's means v_i over its n_i samples.

    One collective, so call it on every rank, with values of the same names and shapes; a rank without samples gives
    ``samples=0``, and whatever values (a mean over nothing is NaN, and stays out). The result has the form that was
    given, and the same bits on every rank.

    For means over something else, such as tokens, ``samples`` is the number of these.

    The sum travels by the wire of a ``LoadBalance`` without ``wire``. Give the ``balance`` of a training that
    has another one (``LoadBalance(wire=…)``). ``balance.evaluate`` divides a dataset among the ranks, too.
    """
    wire = wire_here() if balance is None else cast(TorchSession, balance._session).wire
    named = values if isinstance(values, Mapping) else {"": values}
    plain = {k: v.detach().cpu().double() if isinstance(v, torch.Tensor) else float(v) for k, v in named.items()}
    means = averages(plain, samples, lambda part: wire.allgather_object(part, "hetero.average_by_samples"))
    found = {name: _like(value, means[name]) for name, value in named.items()}
    return found if isinstance(values, Mapping) else found[""]  # type: ignore[return-value]


def _plain(value: Numbers) -> float | torch.Tensor:
    return float(value) if np.ndim(value) == 0 else torch.from_numpy(np.asarray(value))


def _like(value: float | torch.Tensor, average: Any) -> float | torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return float(average)
    dtype = value.dtype if value.is_floating_point() else torch.float64
    return torch.tensor(average, dtype=dtype, device=value.device)
