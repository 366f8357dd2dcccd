"""The micro-batches of this rank as a DataLoader reads them, and its part in rounds in which it has none."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from torch.utils.data import DataLoader, Dataset

from hvd_hetero.data.cutter import Cutter, Parts
from hvd_hetero.rounds import MicroBatch
from torch_hooks.data.counting import Collate, Weights
from torch_hooks.data.late_costs import CostsAhead, PartCosts
from torch_hooks.session import TorchSession

Fetched: TypeAlias = tuple[MicroBatch, list[Any], Any]
"""What the DataLoader has brought: a micro-batch, the indices of its samples, and these collated; None: it has none."""


class MicroBatches:
    """Yields one batch after the other while the cutter has more. ``options`` are the DataLoader's."""

    def __init__(
        self,
        session: TorchSession,
        cutter: Cutter,
        dataset: Dataset[Any],
        collate: Collate,
        weigh: Weights,
        ahead: CostsAhead | None,
        **options: Any,
    ) -> None:
        self.before_round: Callable[[], None] | None = None
        """A function to call on every rank before a round begins, when the loop is done with the round before."""
        self.iterating = False
        """True: an iteration is under way."""
        self.reads_rounds = False
        """True: all micro-batches of a round are read before its first one begins."""
        self.round: list[Any] = []
        """Those batches."""
        self.gathered_s = 0.0
        """Seconds in which the next batch waited for other ranks."""
        self.cutter = cutter
        self._session = session
        self._dataset = dataset
        self._collate = collate
        self._weigh = weigh
        self._ahead = ahead
        self._pending: deque[tuple[MicroBatch, list[Any]]] = deque()
        self._due: int | None = None  # the round of this loader that is finished next
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=_SampleLists(self._sample_lists), collate_fn=collate, **options
        )

    def until(self, stops: Callable[[], bool]) -> Generator[Any, None, bool]:
        """Yield batches until the cutter has no more, and return True; or until it stops, between two rounds."""
        session = self._session
        fetched = self._fetched()
        if self.reads_rounds:
            fetched = self._by_rounds(fetched)
        self._due = session.balancer.rounds
        closed = self._note_closed  # a new object, which says whose the round is
        skipped_s = 0.0
        while not stops():
            session.balancer.expect_next()
            asked_at = time.perf_counter() - skipped_s
            skipped_s = self.gathered_s = 0.0
            try:
                work, indices, batch = next(fetched)
            except StopIteration:
                session.drain()
                return True
            asked_at += self.gathered_s  # no waiting for data
            if work.round < session.balancer.rounds:
                # Fetched ahead for a round that has ended early.
                continue
            if work.samples:
                work = self._weighed(work, batch)
                if not (work.samples or work.last):
                    skipped_s = time.perf_counter() - asked_at
                    continue  # it counts for nothing; the last one is needed to end the round
            elif self._weigh.given:
                work = replace(work, weight=0.0)
            if self.before_round is not None and not session.balancer.in_round:
                began_at = time.perf_counter()
                self.before_round()
                asked_at += time.perf_counter() - began_at
            session.closed = closed
            # Planned before the limit was known.
            most = session.meter.fitting_samples(work) if session.can_split_micro_batches else 0
            in_use = not most
            if not most:
                session.begin(work, time.perf_counter() - asked_at)
                if work.samples:
                    try:
                        yield batch
                        session.end_batch()
                    except GeneratorExit:
                        if session.closed is closed:  # else it is collected while another iteration is under way
                            session.shortage.left()
                            session.exit_loop()
                            self.note_finished()
                            self._due = None  # another loader's rounds from now on are not this one's
                        raise
                    most, asked_at = session.shortage.take_parts(), time.perf_counter()
                else:
                    session.idle_round()
            if most:
                del batch
                yield from self._in_parts(Parts(work, indices, most, memory_in_use=in_use), asked_at)
            self.note_finished()
        session.drain()
        return False

    def note_finished(self) -> None:
        """Pass to the cutter what was done of the round that has just finished, if one has."""
        finished = self._session.balancer.finished
        if finished is not None and finished.round == self._due and self.cutter.ahead:
            self.cutter.finish(finished.table)
            self._due = finished.round + 1

    def _note_closed(self) -> None:
        """Note a round whose table comes late: all ranks did what was planned."""
        self.cutter.finish_as_planned()
        if self._due is not None:
            self._due += 1

    def note_left(self) -> None:
        """Note a round that was finished after its iteration had been left, as by ``next(iter(loader))``."""
        if self.cutter.ahead:
            self._session.exit_loop()

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands after the last finished round, as plain data."""
        self.note_left()
        self.note_finished()
        return self.cutter.state_dict()

    def _fetched(self) -> Iterator[Fetched]:
        """Yield what the DataLoader brings, and note the costs of samples ahead that come between."""
        self._pending.clear()
        for batch in self._loader:
            if isinstance(batch, PartCosts):
                assert self._ahead is not None, "it has asked"
                self._ahead.note(batch)
            else:
                yield *self._pending.popleft(), batch

    def _by_rounds(self, fetched: Iterator[Fetched]) -> Iterator[Fetched]:
        """Yield them as they come, after all of their round are read, and other ranks are told what these count."""
        found: list[Fetched] = []
        for work, indices, batch in fetched:
            found.append((replace(work, weight=self._weigh(batch, work.samples)), indices, batch))
            if work.last:
                self.round = [batch for *_, batch in found]
                if self._weigh.given:
                    self._session.announce(math.fsum(work.weight or 0.0 for work, *_ in found))
                yield from found
                found = []

    def _in_parts(self, parts: Parts, asked_at: float) -> Iterator[Any]:
        """Yield a micro-batch in parts that fit. ``asked_at``: when the rank began to wait for them."""
        session = self._session
        rounds = session.balancer.rounds
        while parts and session.balancer.rounds == rounds:  # another rank may end it
            work, indices = parts.take()
            batch = self._collate(self._fetch(indices))
            work = self._weighed(replace(work, weight=None), batch)
            if not (work.samples or work.last):
                continue
            session.begin(
                work, time.perf_counter() - asked_at, memory_in_use=parts.memory_in_use, more_parts=bool(parts)
            )
            if not work.samples:
                session.idle_round()
                return
            parts.memory_in_use = False
            yield batch
            session.end_batch()
            del batch
            if most := session.shortage.take_parts():
                parts.again(most)
            asked_at = time.perf_counter()

    def _weighed(self, work: MicroBatch, batch: Any) -> MicroBatch:
        """Return the micro-batch with what it counts; without samples if that is nothing and no rank waits for it."""
        weight = self._weigh(batch, work.samples) if work.weight is None else work.weight
        if weight is None:
            return work
        if weight == 0.0 and self._session.beside is None:
            if self._session.waits_in_layers:
                raise ValueError(
                    f"weight_of must be positive with SyncBatchNorm, in which other ranks wait for this one, got 0 for "
                    f"{work.samples} samples; let the dataset return other samples, or use a normalisation that needs "
                    "no other rank, such as GroupNorm"
                )
            work = replace(work, samples=0)
        return replace(work, weight=weight)

    def _fetch(self, indices: list[Any]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)  # as the DataLoader asks
        return list(many(indices)) if callable(many) else [self._dataset[i] for i in indices]

    def _sample_lists(self) -> Iterator[list[Any]]:
        """Yield the micro-batches as lists of indices, or of a stream's samples themselves; empty if there are none.

        Runs in the main process, ahead of the training.
        """
        if self._ahead is not None:
            yield from self._ahead.begin()
        for work, part in self.cutter.micro_batches():
            indices: list[Any] = part if isinstance(part, list) else part.tolist()
            if self._ahead is not None:
                indices = [(work.epoch, index) for index in indices]
            self._pending.append((work, indices))
            yield indices
            if self._ahead is not None and work.last:
                yield self._ahead.next(work.plan)


class _SampleLists:
    """A batch sampler made of a generator function, called again for every epoch."""

    def __init__(self, generate: Callable[[], Iterator[list[Any]]]) -> None:
        self._generate = generate

    def __iter__(self) -> Iterator[list[Any]]:
        return self._generate()


class ReadSamples(Dataset[Any]):
    """Stands for a stream in a DataLoader, which passes it samples instead of indices."""

    def __getitem__(self, sample: Any) -> Any:
        return sample
