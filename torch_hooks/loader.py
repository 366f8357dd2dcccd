"""The data side: micro-batches of this rank, cut by the plan from the order that all ranks share."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, Literal

from torch.utils.data import DataLoader, Dataset, IterableDataset

from hvd_hetero.balancer import MicroBatch
from hvd_hetero.data.contents import ranks_apart, show
from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.data.streams import ShardStream, SharedStream
from hvd_hetero.errors import PlanMismatchError
from torch_hooks.body import Differs
from torch_hooks.data.contents import columns_of
from torch_hooks.data.counting import Collate, Counter
from torch_hooks.data.samplers import drawn_by
from torch_hooks.data.streams import ReadSamples, stream_order
from torch_hooks.load_balance import LoadBalance

__all__ = ["BalancedLoader"]

_NEVER = -1
_FEW = 2  # a batch norm over one sample is an error
_OF_BATCHES = ("pin_memory", "pin_memory_device")  # the rest of what a DataLoader takes is about reading samples
_DECIDED_BY_THE_PLAN = ("batch_size", "generator", "in_order")


class BalancedLoader:
    """Yields the micro-batches of this rank; every sample of an epoch goes to exactly one rank, exactly once.

    It is a ``torch.utils.data.DataLoader`` whose batch sampler follows the plan, so ``num_workers``, ``pin_memory``,
    ``collate_fn``, ``worker_init_fn`` and the rest mean what they mean there.

    With worker processes, batches are fetched ``num_workers * prefetch_factor`` micro-batches ahead, so plans are fixed
    as many rounds ahead (the papers' non-blocking batch-size update): a change of speed shows in the batches that much
    later. Use the same numbers on every rank. Without workers plans take effect in the next round.

    A rank that holds nothing in a round takes part from inside the iteration: the loop's body is not run for it. Nor is
    it for a micro-batch in which ``collate_fn`` has left nothing; where that is the last one, the round ends there.

    ``len()`` is the number of rounds of an epoch with ``global_batch`` samples each, the same on every rank. Under
    policies whose rounds differ in size, non-blocking and elastic ones, an epoch may take more rounds or fewer.

    Parameters
    ----------
    dataset
        Anything with ``__len__`` and ``__getitem__``, or an ``IterableDataset``; whole and alike on every rank. Samples
        of a ``TensorDataset``, a ``Subset`` and torchvision's data sets are compared; of others only the length is.
    balance
        The ``LoadBalance`` of this training.
    shuffle, seed
        Whether each epoch has an order of its own, drawn from the seed and the epoch's number.
    sampler, batch_sampler
        An order of your own: any sampler that one process would have, such as ``WeightedRandomSampler``. It is drawn
        from the seed and the epoch's number, alike on every rank, and each index that it draws is visited once. The
        lists of a ``batch_sampler`` are laid end to end; to keep similar samples together, make lists of
        ``global_batch``.
    drop_last
        Leave out the last round of an epoch if it is a short one. Its samples are not visited in that epoch.
    check_data
        Whether to compare, before the first round, a few samples of a dataset that holds tensors: parts that somebody
        has cut by hand would be cut again.
    stop_at
        End the iteration once ``balance.rounds`` has reached this number. All ranks then stop after the same round; a
        ``break`` in the loop's body stops only the ranks whose body runs. Set a later number and iterate again to go on
        where it stopped: the place to save, evaluate or leave in the middle of an epoch.
    stream, rounds_per_epoch
        For an ``IterableDataset``. "whole": it yields the same samples in the same order on every rank; each round they
        are shared out by the plan, every sample to one rank, and an epoch ends with the stream. "shard": it yields on
        every rank samples of its own; an epoch is ``rounds_per_epoch`` rounds, and a shard that ends begins again. Its
        ``set_epoch``, if it has one, is called with the number of the epoch, or of the pass over the shard. Plans take
        effect in the next round, also with worker processes, among which the dataset must share out its samples by
        ``get_worker_info()``, as in PyTorch. The contents of whole streams are not compared: random order must come
        from a seed that all ranks have. To resume, a stream is read again from its front.
    samples_of
        Needed where ``collate_fn`` leaves samples out, such as those that cannot be read: a function that says how many
        samples a batch holds. Gradients are weighted by these, and what is left out counts as visited. Not for rounds
        that end early ("non-blocking").
    collate_fn, num_workers, prefetch_factor, loader_options
        As in ``DataLoader``. Of a stream, worker processes read samples and the main process collates them.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        balance: LoadBalance,
        *,
        shuffle: bool = False,
        seed: int = 0,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[list[int]] | None = None,
        drop_last: bool = False,
        check_data: bool = True,
        stop_at: int | None = None,
        stream: Literal["whole", "shard"] | None = None,
        rounds_per_epoch: int | None = None,
        samples_of: Callable[[Any], int] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **loader_options: Any,
    ) -> None:
        if not isinstance(balance, LoadBalance):
            raise TypeError(f"balance must be a LoadBalance, got {balance!r}; write BalancedLoader(dataset, balance)")
        session = self._session = balance.session
        session.require_first("BalancedLoader(dataset, balance)")
        streams = isinstance(dataset, IterableDataset)
        if not streams and not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
            raise ValueError(
                f"dataset must have __len__ and __getitem__, so that its samples can be shared out, or be an "
                f"IterableDataset; {type(dataset).__name__} is neither. Or iterate over this rank's part yourself: "
                "take balance.batch_size samples for each batch and announce them with balance.batch(samples)"
            )
        if not streams and (stream is not None or rounds_per_epoch is not None):
            raise ValueError(
                f"stream and rounds_per_epoch are for an IterableDataset, and {type(dataset).__name__} has random "
                "access; leave them out"
            )
        if refused := [name for name in _DECIDED_BY_THE_PLAN if name in loader_options]:
            raise TypeError(
                f"BalancedLoader does not take {', '.join(refused)}: the plan decides which samples form a batch; set "
                "LoadBalance(global_batch=…), shuffle, seed and sampler instead"
            )
        orders = {"shuffle": shuffle, "sampler": sampler is not None, "batch_sampler": batch_sampler is not None}
        if len(chosen := [name for name, given in orders.items() if given]) > 1:
            raise ValueError(f"{' and '.join(chosen)} each decide the order of the samples; give one of them")
        if streams and chosen and not shuffle:
            raise ValueError(f"{chosen[0]} is for a dataset with __len__ and __getitem__; order the stream itself")
        if streams and shuffle:
            raise ValueError(
                "shuffle=True needs a dataset with __len__ and __getitem__; shuffle inside the stream, and a whole "
                "stream alike on every rank"
            )
        if samples_of is not None and session.balancer.plan().ends == "first":
            raise ValueError(
                f"samples_of does not go with policy {balance.policy.name!r}, which tells by the number of samples "
                "done where a rank has stopped; let the dataset return another sample in the place of one that it "
                "cannot read, or use policy='lb-bsp'"
            )
        self._length = _length(dataset) if stream != "shard" else None
        self._order: SharedPermutation | SharedStream | ShardStream
        if not streams:
            assert self._length is not None, "it has been checked"
            given = sampler if batch_sampler is None else batch_sampler
            draw = None if given is None else drawn_by(given, seed, in_batches=sampler is None)
            self._order = SharedPermutation(self._length, shuffle=shuffle, seed=seed, draw=draw)
            self._length = self._order.size
        if drop_last and self._length is not None and self._length < session.balancer.global_batch:
            raise ValueError(
                f"drop_last leaves no round at all: an epoch has {self._length} samples and global_batch is "
                f"{session.balancer.global_batch}; lower global_batch, or leave drop_last out"
            )
        self.epoch = 0
        self.drop_last = drop_last
        self.between_rounds: Callable[[], None] | None = None
        """called on every rank before a round begins, when all that the loop did for the one before is done"""
        self.iterating = False
        """whether an iteration is under way"""
        self.stop_at = stop_at
        self._pending: deque[tuple[MicroBatch, list[Any]]] = deque()
        self._resumes = False
        self._settled = 0
        self._short = ""
        self._compares = check_data and not streams
        self._rounds_per_epoch = rounds_per_epoch
        self._collate = Collate(collate_fn, counted=samples_of is not None)
        self._count = Counter(samples_of, own_collate=collate_fn is not None)
        loader_options |= {"num_workers": num_workers, "prefetch_factor": prefetch_factor}
        if isinstance(dataset, IterableDataset):
            pinned = {name: loader_options.pop(name) for name in _OF_BATCHES if name in loader_options}
            self._order = stream_order(dataset, session.wire, stream, rounds_per_epoch, self._least, loader_options)
            self._dataset: Dataset[Any] = ReadSamples()
            loader_options = pinned
        else:
            self._dataset = dataset
            if num_workers > 0:
                session.balancer.set_lead(num_workers * (prefetch_factor or 2))
        self._loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=_SampleLists(self._sample_lists),
            collate_fn=self._collate,
            **loader_options,
        )

    def __len__(self) -> int:
        if self._rounds_per_epoch is not None:
            return self._rounds_per_epoch
        if isinstance(self._order, SharedPermutation):
            self._length = self._order.size  # samplers may draw more in one epoch than in another
        if self._length is None:
            raise TypeError("the length of this loader is not known, for its stream has no __len__")
        rounds = self._length / self._session.balancer.global_batch
        return math.floor(rounds) if self.drop_last else math.ceil(rounds)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration is, which decides its order. Counted up by itself otherwise."""
        if not (self._resumes and epoch == self._order.epoch):
            self.epoch = epoch
            self._resumes = False

    @property
    def epoch_at_hand(self) -> int:
        """The epoch that the next iteration is, or goes on with."""
        return self._order.epoch if self._resumes else self.epoch

    @property
    def survives_resets(self) -> bool:
        """Whether any number of ranks can go on where some other number has stopped."""
        return not isinstance(self._order, ShardStream)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands after the last finished round, as plain data. Save that of rank 0."""
        self._settle()
        return {"epoch": self.epoch, "least": self._least, "order": self._order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on in the middle of that epoch, from rank 0's state; a collective call.

        Load the state of the ``LoadBalance``, too.
        """
        self.go_on(self._session.wire.broadcast_object(state, root_rank=0, name=f"{self._session.prefix}.loader"))

    def go_on(self, state: Mapping[str, Any]) -> None:
        """The same without a collective, from a state that is the same on every rank."""
        self._order.load_state_dict(state["order"])
        self.epoch = state["epoch"]
        begun = state["order"]["epoch"] < state["epoch"]
        # By the batch of then: where the new one is larger, an epoch that was not over has nothing left, but an end.
        self._resumes = begun and self._order.holds(state["least"])

    @property
    def _least(self) -> int:
        """The samples that a round needs."""
        return self._session.balancer.global_batch if self.drop_last else 1

    def __iter__(self) -> Iterator[Any]:
        self.iterating = True
        try:
            yield from self._epoch()
        finally:
            self.iterating = False

    def _epoch(self) -> Iterator[Any]:
        session = self._session
        session.abandon_round()  # in case the last iteration was left inside one
        self._require_the_same_data()
        if self._resumes:
            self._resumes = False  # in the epoch that the state was in the middle of
        else:
            self._order.start(self.epoch)
            self._require_a_round()
            self.epoch += 1
        self._require_data_on_all()
        self._order.lead = session.balancer.lead
        while self._order.holds(self._least):
            over = yield from self._pass()
            if not over:
                self._go_on_later()
                return
            if not self._order.resume():
                return

    def _require_a_round(self) -> None:
        """Of streams and samplers, whose length is known only now; this rank would leave the others waiting."""
        if self._order.remaining < self._least:
            raise ValueError(
                f"epoch {self.epoch} has {self._order.remaining} samples, fewer than a round needs ({self._least}); "
                "every iter() of an IterableDataset or of a sampler must give all of them anew, and drop_last needs "
                "global_batch of them"
            )

    def _require_the_same_data(self) -> None:
        """Once, as far as data are told: parts of equal length, cut by hand, would be cut again by the plan."""
        session, compares, self._compares = self._session, self._compares, False
        if not compares or session.balancer.workers == 1:
            return
        mine = show(len(self._dataset), columns_of(self._dataset))  # type: ignore[arg-type]
        told = session.wire.allgather_object(mine, name=f"{session.prefix}.contents")
        if ranks := ranks_apart(told):
            raise PlanMismatchError(
                f"ranks {ranks} hold other samples than rank 0 at the same indices. Give every rank the whole dataset, "
                "alike: BalancedLoader shares it out. Seed what is drawn at random; where each rank can only read "
                "samples of its own, use an IterableDataset and stream='shard'. If they differ as they should "
                "(augmented beforehand, a cache that fills), check_data=False does not compare"
            )

    def _require_data_on_all(self) -> None:
        """Where layers wait for other ranks, no round of this epoch may leave a rank without: say so at once.

        Elsewhere, note if one will.
        """
        self._short = ""
        session = self._session
        if self.drop_last or not isinstance(self._order, SharedPermutation):
            return
        workers = session.balancer.workers
        whole, short = divmod(self._order.remaining, session.balancer.global_batch)
        reached = self.stop_at is None or self.stop_at > session.balancer.rounds + whole
        if reached and 0 < short < workers:
            samples = f"{short} sample{'s' * (short > 1)}"
            self._short = f"the last round of this epoch has {samples} for {workers} ranks"
            if session.waits_in_layers:
                raise ValueError(
                    f"{self._short}, and SyncBatchNorm needs one on every rank; give the loader drop_last=True, or "
                    "another global_batch"
                )

    def _bodies_differ(self, work: MicroBatch) -> Differs | None:
        """Why the loop's body does not run equally often on all ranks, in this round or later; None: it does."""
        policy, plan = self._session.policy, work.plan
        if plan.ends == "first":
            return Differs("in each round it runs as often as a rank gets to", now=not work.last)
        if len(set(plan.micro_batches)) > 1:
            times = ", ".join(map(str, plan.micro_batches))
            return Differs(f"in this round it runs {times} times", now=not (work.last and all(plan.micro_batches)))
        if self._short and policy.keeps_total:
            return Differs(self._short, certain=True)
        if policy.accumulates:
            return Differs(f"policy {policy.name!r} may give ranks unequal numbers of micro-batches")
        if self._count.told:
            return Differs("collate_fn may leave a rank without samples")
        if not (self.drop_last or isinstance(self._order, SharedPermutation)) or isinstance(self._order, ShardStream):
            return Differs("the stream may end with a round that leaves a rank without samples")
        return None

    def _go_on_later(self) -> None:
        """The next iteration begins where this one stops."""
        if isinstance(self._order, SharedPermutation):
            self.load_state_dict(self.state_dict())  # ranks may have taken slices ahead, as many as they happened to
        else:
            self._resumes = self._order.remaining >= self._least

    def _pass(self) -> Generator[Any, None, bool]:
        """Rounds until the order has nothing more to take; some of what was taken may come back to it.

        Whether it got there: ``stop_at`` may come first.
        """
        session = self._session
        self._pending.clear()
        batches = iter(self._loader)
        self._settled = session.balancer.rounds
        skipped_s = 0.0
        while self.stop_at is None or session.balancer.rounds < self.stop_at:
            session.balancer.expect_next()
            asked_at = time.perf_counter() - skipped_s
            skipped_s = 0.0
            try:
                batch = next(batches)
            except StopIteration:
                return True
            work, indices = self._pending.popleft()
            if work.round < session.balancer.rounds:
                continue  # fetched ahead for a round that has ended early
            if work.samples:
                if (samples := self._count(batch, work.samples, required=session.waits_in_layers)) != work.samples:
                    work = replace(work, samples=samples)
                if not (work.samples or work.last):
                    skipped_s = time.perf_counter() - asked_at
                    continue  # collate_fn has left out all of it; the last one is needed to end the round
            if self.between_rounds is not None and not session.balancer.in_round:
                self.between_rounds()
            limit = session.meter.limit
            if 0 < limit < work.samples:  # planned before it was known what fits
                del batch
                yield from self._in_parts(work, indices, limit, asked_at)
                self._settle()
                continue
            session.begin(work, time.perf_counter() - asked_at)
            if work.samples:
                if session.body.is_new(session.balancer.rounds) and (differs := self._bodies_differ(work)):
                    session.enter_body(differs)
                try:
                    yield batch
                    session.body.leave()
                except GeneratorExit:
                    session.body.close()
                    session.shortage.left()
                    self._settle()
                    self._settled = _NEVER  # what another loader does from now on is none of this one's rounds
                    raise
                if parts := session.shortage.take_parts():
                    del batch
                    yield from self._in_parts(work, indices, parts, time.perf_counter(), _FEW)
            else:
                session.idle_round()
            self._settle()
        return False

    def _settle(self) -> None:
        """Note what was done of the round that has just finished, if one has."""
        finished = self._session.balancer.finished
        if finished is not None and finished.round == self._settled and self._order.in_flight:
            # Whoever was to do all samples has done with all, also with those that collate_fn has left out.
            all_done = finished.plan.ends == "all"
            self._order.settle(finished.plan.samples if all_done else finished.table.figures("samples"))
            self._settled += 1

    def _in_parts(
        self, work: MicroBatch, indices: list[Any], parts: int, asked_at: float, few: int | None = None
    ) -> Iterator[Any]:
        """The samples of a micro-batch that does not fit, in smaller ones of at most ``parts``.

        The first of them has ``few``: the names in the loop's body still hold the graph of the failed attempt, until
        the body binds them anew, which a small part does before memory runs short again. ``asked_at``: when the rank
        began to wait for them.
        """
        waiting = deque([indices])
        while waiting and work.round == self._session.balancer.rounds:
            part = waiting.popleft()
            size = min(parts, few) if few else -(-len(part) // -(-len(part) // parts))
            if len(part) > size:
                waiting.appendleft(part[size:])
                part = part[:size]
            last = work.last and not waiting
            batch = self._collate(self._fetch(part))
            samples = self._count(batch, len(part), required=self._session.waits_in_layers)
            if not (samples or last):
                continue
            waited_s = time.perf_counter() - asked_at
            self._session.begin(replace(work, samples=samples, last=last), waited_s, cramped=few is not None)
            if not samples:
                self._session.idle_round()
                return
            few = None
            yield batch
            del batch
            if smaller := self._session.shortage.take_parts():
                waiting.appendleft(part)
                parts, few = smaller, _FEW
            asked_at = time.perf_counter()

    def _fetch(self, indices: list[Any]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)  # as the DataLoader asks
        return list(many(indices)) if callable(many) else [self._dataset[i] for i in indices]

    def _sample_lists(self) -> Iterator[list[Any]]:
        """The micro-batches of this rank for one epoch as lists of indices, or of a stream's samples themselves.

        An empty list for a round without any.

        Runs in the main process, ahead of the training by the lead at most: every round yields at least one list here,
        so a prefetch of L lists is never more than L rounds ahead.
        """
        balancer = self._session.balancer
        upcoming = balancer.rounds
        while self._order.remaining >= self._least:
            place = self._order.place
            plan, samples = self._order.take(balancer.plan(upcoming - balancer.rounds), balancer.rank)
            if isinstance(samples, list):
                place = self._order.place  # of a stream that has ended with this round, it tells
            else:
                samples = samples.tolist()
            sizes = plan.sizes(balancer.rank) or (0,)
            for i, size in enumerate(sizes, start=1):
                if upcoming < balancer.rounds:
                    break  # the round has ended early: nobody will ask for the rest
                part, samples = samples[:size], samples[size:]
                self._pending.append(
                    (MicroBatch(plan, size, i == len(sizes), self._order.epoch, place, upcoming), part)
                )
                yield part
            upcoming += 1


def _length(dataset: object) -> int | None:
    """None where it is not known: a chain of streams has a ``__len__`` that may fail."""
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
    except TypeError:
        if isinstance(dataset, IterableDataset):
            return None
        raise


class _SampleLists:
    """A batch sampler made of a generator function, called anew for every epoch."""

    def __init__(self, generate: Callable[[], Iterator[list[Any]]]) -> None:
        self._generate = generate

    def __iter__(self) -> Iterator[list[Any]]:
        return self._generate()
