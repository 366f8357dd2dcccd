"""The data side: micro-batches of this rank, cut by the plan from the order that all ranks share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import Dataset, IterableDataset

from hvd_hetero.bounds import Said, require_same_bounds
from hvd_hetero.checks import integer
from hvd_hetero.data.cutter import Cutter
from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.data.sample_costs import NO_COSTS, CostOf, SampleCosts
from hvd_hetero.errors import RoundStateError
from torch_hooks.data.contents import require_alike, shown
from torch_hooks.data.counting import Collate, Weights
from torch_hooks.data.late_costs import CostsAhead, SeededSamples
from torch_hooks.data.micro_batches import MicroBatches, ReadSamples
from torch_hooks.data.orders import order_of
from torch_hooks.data.workers import EndsWithRank
from torch_hooks.load_balance import LoadBalance
from torch_hooks.session import WEIGHT_OF_SUMS

_OF_BATCHES = ("pin_memory", "pin_memory_device")  # the rest of what a DataLoader takes is about reading samples
_DECIDED_BY_THE_PLAN = ("batch_size", "generator", "in_order")


class BalancedLoader:
    """Yields the micro-batches of this rank; every sample of an epoch goes to exactly one rank, exactly once.

    It is a ``torch.utils.data.DataLoader`` whose batch sampler follows the plan, so ``num_workers``, ``pin_memory``,
    ``collate_fn``, ``worker_init_fn`` and the rest mean what they mean there.

    With worker processes, batches are fetched ``num_workers * prefetch_factor`` micro-batches ahead, so plans are fixed
    as many rounds ahead (the papers' non-blocking batch-size update): a change of speed shows in the batches that much
    later. Use the same numbers on every rank. Without workers plans take effect in the next round.

    A remainder of fewer samples than ranks joins the round before it. A rank that holds nothing in a round, as happens
    with several micro-batches, takes part from inside the iteration: the loop's body is not run for it. Nor is it for a
    micro-batch in which ``collate_fn`` has left nothing; where that is the last one, the round ends there.

    ``len()`` is the number of rounds of an epoch with ``global_batch`` samples each, the same on every rank, times
    ``micro_batches``: what the loop counts. Under policies whose rounds differ in size, non-blocking and elastic ones,
    an epoch may take more rounds or fewer, and ``max_micro_batch`` may cut them into more micro-batches.

    Parameters
    ----------
    dataset
        Anything with ``__len__`` and ``__getitem__``, or an ``IterableDataset``; whole and alike on every rank. Samples
        of a ``TensorDataset``, a ``Subset`` and torchvision's data sets are compared; of others the length.
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
        Leave out the last round of an epoch if it is shorter than planned for it, as ``Goodput`` may have changed it.
        Its samples are not visited in that epoch.
    check_data
        Whether to compare, before the first round, a few samples of a dataset that holds tensors: parts that a user has
        cut by hand would be cut again.
    stop_at
        End the iteration once ``balance.rounds`` has reached this number. All ranks then stop after the same round; a
        ``break`` in the loop's body stops only the ranks whose body runs. Set a later number and iterate again to go on
        where it stopped: the place to save, evaluate or leave in the middle of an epoch.
    micro_batches
        Beside a reducer of your own (``LoadBalance.scale``): micro-batches of a round, the same number on every rank,
        of unequal size; ``LoadBalance.accumulate`` defers the reduction to the last one. None: one, or more where
        ``max_micro_batch`` of the policy asks for them.
    stream, rounds_per_epoch
        For an ``IterableDataset``, as in ``docs/data.md``. "whole": it yields the same samples in the same order on
        every rank, which are not compared: random order must come from a seed that all ranks have. "shard": ranks read
        different samples. A dataset with ``num_shards`` and ``shard()``, the same on every rank, is handed out by
        shards. Any other yields on every rank samples of its own, and so does one with ``rounds_per_epoch``: an epoch
        is so many rounds, and a shard that ends begins again. Worker processes read samples; those of a dataset without
        shards must share them out by ``get_worker_info()``. ``set_epoch``, if any, is called with the number of the
        epoch, or of the pass over the shard.
    weight_of
        A function of a batch that returns what its mean loss is over, if not its samples:
        ``lambda batch: (batch["labels"] != -100).sum()``. The gradient is then the mean over these of all ranks and
        micro-batches, as in one process. Needed, too, where ``collate_fn`` leaves samples out, such as those that
        cannot be read. The loop's body does not run for a batch of weight 0; it does beside a reducer of your own,
        where all batches of a round are read before its first one is used.
    cost_of
        What a sample costs, if samples cost unequally much, such as its length: a number for each, or a function of
        what the dataset returns, ``lambda sample: len(sample["input_ids"])``. A round's samples are then divided by
        what they cost instead of by number. How time depends on these numbers is measured. For a function each sample
        is read twice, some rounds ahead and to train on it, with the same random numbers (``docs/costs.md``). For
        "lb-bsp", "bsp" and ``StaticAllocation``.
    max_micro_batch_cost
        The number of a micro-batch's samples times the greatest ``cost_of`` among them that memory allows: for all
        ranks, a list with one for each, or a dict by the names of devices. A rank's share is cut into as many
        micro-batches as that needs, with samples of similar cost put together. Beside a reducer of your own all ranks
        do equally many; in a round with too few samples for that one may hold a sample more.
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
        micro_batches: int | None = None,
        stream: Literal["whole", "shard"] | None = None,
        rounds_per_epoch: int | None = None,
        weight_of: Callable[[Any], float] | None = None,
        cost_of: CostOf | None = None,
        max_micro_batch_cost: Said = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **loader_options: Any,
    ) -> None:
        if not isinstance(balance, LoadBalance):
            raise TypeError(f"balance must be a LoadBalance, got {balance!r}; write BalancedLoader(dataset, balance)")
        session = self._session = balance._session
        session.require_first("BalancedLoader(dataset, balance)")
        if refused := [name for name in _DECIDED_BY_THE_PLAN if name in loader_options]:
            raise TypeError(
                f"BalancedLoader does not take {', '.join(refused)}: the plan decides which samples form a batch; set "
                "LoadBalance(global_batch=…), shuffle, seed and sampler instead"
            )
        if weight_of is not None and not session.sums_gradients:
            raise ValueError(WEIGHT_OF_SUMS.format("weight_of", balance.policy.name))
        self._streams = isinstance(dataset, IterableDataset)
        loader_options |= {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "worker_init_fn": EndsWithRank(loader_options.get("worker_init_fn")),
        }
        reads_ahead = callable(cost_of) and not self._streams
        if reads_ahead and num_workers > 0:  # each round is a batch and a list of costs
            loader_options["prefetch_factor"] = 2 * (prefetch_factor or 2)
        if self._streams:  # worker processes read samples, and batches are made here
            of_batches = {name: loader_options.pop(name) for name in _OF_BATCHES if name in loader_options}
        else:
            of_batches = loader_options
        workers, global_batch = session.balancer.workers, session.balancer.planner.global_batch
        remedy = "give as many as you accumulate, of at least one sample on each rank"
        in_step = 1 if micro_batches is None else micro_batches
        self._in_step = integer("micro_batches", in_step, 1, global_batch // workers + 1, remedy=remedy)
        self._asks_in_step = micro_batches is not None
        adapts = session.balancer.planner.goodput
        most = global_batch if adapts is None else adapts.most  # samples of a round
        least = most if drop_last else 1
        order = order_of(
            dataset, session.wire, shuffle=shuffle, seed=seed, sampler=sampler, batch_sampler=batch_sampler,
            stream=stream, rounds_per_epoch=rounds_per_epoch, least=least, options=loader_options,
            gather=self._gather,
        )  # fmt: skip
        if order.size is not None and order.size < least:
            raise ValueError(
                f"drop_last leaves no round at all: an epoch has {order.size} samples and global_batch is {least}"
                f"{'' if adapts is None else ' at most'}; lower it, or leave drop_last out"
            )
        if num_workers > 0 and not self._streams:
            session.balancer.set_rounds_ahead(num_workers * (prefetch_factor or 2))
        self.drop_last = drop_last
        self.stop_at = stop_at
        self.dataset = dataset
        """The dataset, as given."""
        self._largest, ahead = max_micro_batch_cost, None
        if cost_of is not None:
            size = None if self._streams else len(dataset)  # type: ignore[arg-type]  # maps have a length
            order.costs = SampleCosts.of(
                cost_of, session.policy, session.balancer.meter.learner.enable_costs(), size, max_micro_batch_cost,
                shared=stream != "shard", devices=session.devices, logs=session.balancer.rank == 0,
            )  # fmt: skip
            if callable(cost_of) and isinstance(order, SharedPermutation):
                slots = 2 * num_workers * (prefetch_factor or 2)
                ahead, dataset = CostsAhead(session, order, most, slots), SeededSamples(dataset, cost_of, seed)
        elif max_micro_batch_cost is not None:
            raise ValueError(NO_COSTS)
        balancer = session.balancer
        self._cutter = Cutter(order, balancer.planner, balancer.rank, drop_last=drop_last, ledger=balancer.ledger)
        if self._asks_in_step:
            self._keep_in_step(self._in_step)  # it decides how many rounds there are
        self._compared = False
        self._compares = check_data and not self._streams
        self._rounds_per_epoch = rounds_per_epoch
        self._weigh = Weights(weight_of)
        self._micro_batches = MicroBatches(
            session,
            self._cutter,
            ReadSamples() if self._streams else dataset,
            Collate(collate_fn, counted=weight_of is not None),
            self._weigh,
            ahead,
            **of_batches,
        )

    def __len__(self) -> int:
        if self._rounds_per_epoch is not None:
            return self._rounds_per_epoch * self._in_step
        size = self._cutter.order.size  # of this epoch: samplers may draw more in one than in another
        if size is None:
            if self._session.batches_at_most:
                return self._session.batches_at_most
            raise TypeError("the length of this loader is not known, for its stream has no __len__")
        return self._cutter.rounds_of(size) * self._in_step

    @property
    def sized(self) -> bool:
        """Whether it has a length: not where a stream has none."""
        known = self._rounds_per_epoch is not None or self._cutter.order.size is not None
        return known or self._session.batches_at_most > 0

    @property
    def cuts_by_cost(self) -> bool:
        """Whether what samples cost decides how many micro-batches a round has."""
        costs = self._cutter.order.costs
        return costs is not None and costs.limited and not costs.exactly

    @property
    def epoch(self) -> int:
        """The epoch that begins next."""
        return self._cutter.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def epoch_at_hand(self) -> int:
        """The epoch that the next iteration is, or goes on with."""
        return self._cutter.epoch_at_hand

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which decides its order; by default epochs are counted."""
        self._cutter.want(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands after the last finished round, as plain data. Save rank 0's."""
        return self._micro_batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle of that epoch in the next iteration, from rank 0's state; a collective call.

        Load the state of the ``LoadBalance``, too.
        """
        state = self._session.wire.broadcast_object(state, root_rank=0, name=f"{self._session.prefix}.loader")
        self._cutter.load_state_dict(state)

    def skip(self, rounds: int) -> None:
        """Have the next iteration leave out the first rounds of its epoch, which an earlier job has done.

        Beside a reducer of your own, where all rounds hold ``global_batch`` samples: nothing need be saved but their
        number. Call it on all ranks alike, after ``set_epoch`` and after the model is wrapped.
        """
        self._session.require_reducer()
        if self._session.beside is None:
            raise ValueError("skip() is for a reducer of your own; load the loader's state_dict() instead")
        if self._session.balancer.planner.goodput is not None:
            raise ValueError(
                "skip() needs rounds of one size, and with global_batch=Goodput(…) they differ; load the loader's "
                "state_dict() instead"
            )
        self._fit_reducer()
        self._cutter.skip(rounds)

    def __iter__(self) -> Iterator[Any]:
        self._micro_batches.iterating = True
        try:
            yield from self._epoch()
        finally:
            self._micro_batches.iterating = False

    def _epoch(self) -> Iterator[Any]:
        session = self._session
        if not torch.is_grad_enabled():
            raise RoundStateError(
                "a BalancedLoader is for training, and gradients are off here, as in a validation loop; write "
                "balance.evaluate(dataset, function), or give the loop an EvaluationLoader(dataset, balance)"
            )
        session.trains_here()
        session.require_reducer()
        self._fit_reducer()
        self._micro_batches.note_left()
        session.discard_round()  # in case the last iteration was left inside one
        if not self._compared and session.balancer.workers > 1:
            self._compared = True
            mine = self._largest, shown(self.dataset) if self._compares else None
            bounds, rows = zip(*session.wire.allgather_object(mine, name=f"{session.prefix}.data"), strict=True)
            if None not in rows:
                require_alike(rows)
            require_same_bounds("max_micro_batch_cost", bounds, "give a list with one bound for each rank")
        cutter = self._cutter
        # The length of streams and samplers is known only now.
        if cutter.begin() and not cutter.more:
            again = "every iter() of an IterableDataset or of a sampler must give all samples again"
            least = cutter.least()
            raise ValueError(
                f"epoch {cutter.order.epoch} has {cutter.order.remaining} samples, fewer than a round needs ({least}); "
                + (again if least == 1 else "lower global_batch, or leave drop_last out")
            )
        session.balancer.planner.note_epoch(cutter.order.size)
        self._require_data_on_all()
        while cutter.more:
            over = yield from self._micro_batches.until(self._stops)
            if not over:
                self._go_on_later()
                return

    def _gather(self, mine: Any) -> Sequence[Any]:
        """Return what all ranks give, in the order of ranks; no rank counts the wait as time for its data."""
        session, began_at = self._session, time.perf_counter()
        everywhere = session.wire.allgather_object(mine, name=f"{session.prefix}.parts")
        self._micro_batches.gathered_s += time.perf_counter() - began_at
        return everywhere

    def _fit_reducer(self) -> None:
        """Cut rounds as the reducer needs them, or raise where it cannot be."""
        session = self._session
        if session.beside is None:
            if self._asks_in_step:
                raise ValueError(
                    "micro_batches is for a reducer of your own, and balance serves a DistributedOptimizer; leave it "
                    "out, and give max_micro_batch to the policy"
                )
            if session.waits_in_layers and session.policy.shares_alone:  # as many as the rank that was to do most
                plan = session.balancer.plan()
                several = 1 if getattr(session.policy, "max_micro_batch", None) else max(plan.micro_batches)
                self._keep_in_step(min(several, *plan.samples))
            return
        if self._weigh.given:
            self._micro_batches.reads_rounds = True  # what all ranks count is known only when all batches are
        self._keep_in_step(self._in_step)

    def _keep_in_step(self, micro_batches: int) -> None:
        goodput, least = self._session.balancer.planner.goodput, self._session.balancer.workers * micro_batches
        if goodput is not None and goodput.least < least:
            raise ValueError(
                f"least of Goodput(…) must be at least {least}, a sample for each rank and micro-batch, as a reducer "
                f"of your own and SyncBatchNorm need; got {goodput.least}"
            )
        self._session.balancer.planner.require_equal_counts(micro_batches, exactly=self._asks_in_step)

    def _stops(self) -> bool:
        return self.stop_at is not None and self._session.balancer.rounds >= self.stop_at

    def _require_data_on_all(self) -> None:
        """Raise if the epoch is too short for layers that wait for other ranks."""
        session, order = self._session, self._cutter.order
        workers, each = session.balancer.workers, order.end.room.least or 1
        if self._streams and session.waits_in_layers:
            order.holds(workers * each)  # a stream knows what remains once it has read so far
        remaining = order.remaining
        if session.waits_in_layers and remaining is not None and remaining < workers * each and not self._stops():
            who = "SyncBatchNorm" if session.beside is None else "your reducer"
            raise ValueError(
                f"epoch {order.epoch} has {remaining} sample(s) left for {workers} ranks, and "
                f"{who} needs {each} on every rank; give the loader more samples, or launch fewer ranks"
            )

    def _go_on_later(self) -> None:
        """Let the next iteration begin where this one stops."""
        if self._streams:
            self._cutter.stop()
        else:  # ranks may have cut rounds ahead, as many as they happened to
            self.load_state_dict(self.state_dict())
