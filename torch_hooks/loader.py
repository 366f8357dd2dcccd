"""The data side: micro-batches of this rank, cut by the plan from the order that all ranks share."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any

import horovod.torch as hvd
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hvd_hetero.balancer import MicroBatch
from hvd_hetero.sampling import SharedPermutation
from torch_hooks.load_balance import LoadBalance

__all__ = ["BalancedLoader"]

_FEW = 2  # a batch norm over one sample is an error
_DECIDED_BY_THE_PLAN = ("batch_size", "sampler", "batch_sampler", "generator", "in_order")


class BalancedLoader:
    """Yields the micro-batches of this rank; every sample of an epoch goes to exactly one rank, exactly once.

    It is a ``torch.utils.data.DataLoader`` whose batch sampler follows the plan, so ``num_workers``, ``pin_memory``,
    ``collate_fn``, ``worker_init_fn`` and the rest mean what they mean there.

    With worker processes, batches are fetched ``num_workers * prefetch_factor`` micro-batches ahead, so plans are fixed
    as many rounds ahead (the papers' non-blocking batch-size update): a change of speed shows in the batches that much
    later. Use the same numbers on every rank. Without workers plans take effect in the next round.

    A rank that holds nothing in a round takes part from inside the iteration: the loop's body is not run for it.

    ``len()`` is the number of rounds of an epoch with ``global_batch`` samples each, the same on every rank. Under
    policies whose rounds differ in size, non-blocking and elastic ones, an epoch may take more rounds or fewer.

    Parameters
    ----------
    dataset
        Anything with ``__len__`` and ``__getitem__``.
    balance
        The ``LoadBalance`` of this training.
    shuffle, seed
        Whether each epoch has an order of its own, drawn from the seed and the epoch's number.
    drop_last
        Leave out the last round of an epoch if it is a short one. Its samples are not visited in that epoch.
    stop_at
        End the iteration once ``balance.rounds`` has reached this number. All ranks then stop after the same round; a
        ``break`` in the loop's body stops only the ranks whose body runs. Set a later number and iterate again to go on
        where it stopped: the place to save, evaluate or leave in the middle of an epoch.
    collate_fn, num_workers, prefetch_factor, loader_options
        As in ``DataLoader``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        balance: LoadBalance,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        stop_at: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **loader_options: Any,
    ) -> None:
        if not isinstance(balance, LoadBalance):
            raise TypeError(f"balance must be a LoadBalance, got {balance!r}; write BalancedLoader(dataset, balance)")
        if isinstance(dataset, IterableDataset) or not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
            raise ValueError(
                f"dataset must have __len__ and __getitem__, so that its samples can be shared out; "
                f"{type(dataset).__name__} has not. Read the stream into a map-style dataset, or iterate over this "
                "rank's shard yourself: take balance.batch_size samples for each batch and announce them with "
                "balance.batch(samples)"
            )
        if refused := [name for name in _DECIDED_BY_THE_PLAN if name in loader_options]:
            raise TypeError(
                f"BalancedLoader does not take {', '.join(refused)}: the plan decides which samples form a batch; set "
                "LoadBalance(global_batch=…), shuffle and seed instead"
            )
        if drop_last and len(dataset) < balance.balancer.global_batch:
            raise ValueError(
                f"drop_last leaves no round at all: the dataset has {len(dataset)} samples and global_batch is "
                f"{balance.balancer.global_batch}"
            )
        self.epoch = 0
        self.drop_last = drop_last
        self.stop_at = stop_at
        self._balance = balance
        self._order = SharedPermutation(len(dataset), shuffle=shuffle, seed=seed)
        self._pending: deque[tuple[MicroBatch, list[int]]] = deque()
        self._resumes = False
        self._settled = 0
        self._dataset = dataset
        self._collate = collate_fn or default_collate
        if num_workers > 0:
            prefetch_factor = 2 if prefetch_factor is None else prefetch_factor
            balance.balancer.set_lead(num_workers * prefetch_factor)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=_IndexLists(self._index_lists),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            collate_fn=_CollateUnlessEmpty(self._collate),
            **loader_options,
        )

    def __len__(self) -> int:
        rounds = self._order.length / self._balance.balancer.global_batch
        return math.floor(rounds) if self.drop_last else math.ceil(rounds)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration is, which decides its order. Counted up by itself otherwise."""
        if not (self._resumes and epoch == self._order.epoch):
            self.epoch = epoch
            self._resumes = False

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands after the last finished round, as plain data. Save that of rank 0."""
        self._settle()
        return {"epoch": self.epoch, "order": self._order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on in the middle of that epoch, from rank 0's state; a collective call.

        Load the state of the ``LoadBalance``, too.
        """
        state = hvd.broadcast_object(state, root_rank=0, name=f"{self._balance.prefix}.loader")
        self._order.load_state_dict(state["order"])
        self.epoch = state["epoch"]
        self._resumes = self._order.remaining >= self._least

    @property
    def _least(self) -> int:
        """The samples that a round needs."""
        return self._balance.balancer.global_batch if self.drop_last else 1

    def __iter__(self) -> Iterator[Any]:
        balance = self._balance
        if balance.optimizer is not None:
            balance.optimizer.abandon_round()  # in case the last iteration was left inside one
        if self._resumes:
            self._resumes = False  # in the epoch that the state was in the middle of
        else:
            self._order.start(self.epoch)
            self.epoch += 1
        self._order.lead = balance.balancer.lead
        while self._order.remaining >= self._least:
            over = yield from self._pass()
            if not over:
                self.load_state_dict(self.state_dict())  # a later iteration goes on here
                return
            if not self._order.resume():
                return

    def _pass(self) -> Generator[Any, None, bool]:
        """Rounds until the order has nothing more to take; some of what was taken may come back to it.

        Whether it got there: ``stop_at`` may come first.
        """
        balance = self._balance
        self._pending.clear()
        batches = iter(self._loader)
        self._settled = balance.rounds
        while self.stop_at is None or balance.rounds < self.stop_at:
            balance.balancer.expect_next()
            asked_at = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return True
            work, indices = self._pending.popleft()
            if work.round < balance.rounds:
                continue  # fetched ahead for a round that has ended early
            limit = balance.balancer.pace.limit
            if 0 < limit < work.samples:  # planned before it was known what fits
                del batch
                yield from self._in_parts(work, indices, limit)
                self._settle()
                continue
            balance.begin(work, time.perf_counter() - asked_at)
            if work.samples:
                try:
                    yield batch
                except GeneratorExit:
                    balance.left()
                    raise
                if parts := balance.take_parts():
                    del batch
                    yield from self._in_parts(work, indices, parts, _FEW)
            else:
                balance.idle_round()
            self._settle()
        return False

    def _settle(self) -> None:
        """Note what was done of the round that has just finished, if one has."""
        finished = self._balance.balancer.finished
        if finished is not None and finished.round == self._settled:
            self._order.settle(finished.table.column("samples").tolist())
            self._settled += 1

    def _in_parts(self, work: MicroBatch, indices: list[int], parts: int, few: int | None = None) -> Iterator[Any]:
        """The samples of a micro-batch that does not fit, in smaller ones of at most ``parts``.

        The first of them has ``few``: the names in the loop's body still hold the graph of the failed attempt, until
        the body binds them anew, which a small part does before memory runs short again.
        """
        waiting = deque([indices])
        while waiting and work.round == self._balance.rounds:
            part = waiting.popleft()
            size = min(parts, few) if few else -(-len(part) // -(-len(part) // parts))
            if len(part) > size:
                waiting.appendleft(part[size:])
                part = part[:size]
            last = work.last and not waiting
            self._balance.begin(replace(work, samples=len(part), last=last), cramped=few is not None)
            few = None
            yield self._collate(self._fetch(part))
            if smaller := self._balance.take_parts():
                waiting.appendleft(part)
                parts, few = smaller, _FEW

    def _fetch(self, indices: list[int]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)  # as the DataLoader asks
        return list(many(indices)) if callable(many) else [self._dataset[i] for i in indices]

    def _index_lists(self) -> Iterator[list[int]]:
        """The micro-batches of this rank for one epoch as lists of indices; an empty list for a round without any.

        Runs in the main process, ahead of the training by the lead at most: every round yields at least one list here,
        so a prefetch of L lists is never more than L rounds ahead.
        """
        balancer = self._balance.balancer
        upcoming = balancer.rounds
        while self._order.remaining >= self._least:
            place = self._order.place
            plan, indices = self._order.take(balancer.plan(upcoming - balancer.rounds), balancer.rank)
            sizes = plan.sizes(balancer.rank) or (0,)
            for i, size in enumerate(sizes, start=1):
                if upcoming < balancer.rounds:
                    break  # the round has ended early: nobody will ask for the rest
                part = indices[:size].tolist()
                self._pending.append(
                    (MicroBatch(plan, size, i == len(sizes), self._order.epoch, place, upcoming), part)
                )
                yield part
                indices = indices[size:]
            upcoming += 1


class _IndexLists:
    """A batch sampler made of a generator function, called anew for every epoch."""

    def __init__(self, generate: Callable[[], Iterator[list[int]]]) -> None:
        self._generate = generate

    def __iter__(self) -> Iterator[list[int]]:
        return self._generate()


class _CollateUnlessEmpty:
    """Collates as told; no samples make no batch. A class, so that it reaches worker processes however they start."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        return self._collate(samples) if len(samples) else None
