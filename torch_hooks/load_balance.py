"""What the loader and the optimizer of one training share: the policy and the state of the rounds."""

from __future__ import annotations

import gc
import logging
import traceback
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import torch

from hvd_hetero.balancer import Balancer, MicroBatch
from hvd_hetero.checks import integer
from hvd_hetero.consistency import WaysOut
from hvd_hetero.errors import HeteroError, RoundStateError
from hvd_hetero.measurement.out_of_memory import is_out_of_memory
from hvd_hetero.policies import BSP, Policy
from hvd_hetero.session import Session
from hvd_hetero.topology.mixing import Mixing
from hvd_hetero.watchdog import Patience
from torch_hooks.arguments import LOAD_BALANCE, refuse
from torch_hooks.body import Body, Differs, another_batch

if TYPE_CHECKING:
    from torch_hooks.optimizer import DistributedOptimizer

__all__ = ["LoadBalance"]

logger = logging.getLogger(__name__)

_WAY_OUT = (
    "and out of memory ends the training on all ranks; to survive it, write: for batch in loader: "
    "with balance.surviving_out_of_memory(): … (docs/gpu.md), or set max_micro_batch of the policy"
)

_WAYS_OUT = WaysOut(
    fingerprint="Give all ranks the same policy, global_batch, dataset (of their own: stream='shard'), seed, "
    "num_workers and prefetch_factor, let them leave an epoch at the same round (stop_at of the loader), and freeze "
    "parameters on all of them at once",
    settings="The body of the loop runs once per micro-batch, and not at all on a rank without data: do what belongs "
    "to an update, such as scheduler.step(), in optimizer.register_step_post_hook(…), or once per epoch",
    witness="The body of the loop does not run on a rank without data: change gradients, as clipping does, in "
    "optimizer.register_step_pre_hook(…), and let all ranks change parameters alike",
    unused="Call optimizer.step() once for every batch, also for one that you would rather skip; to accumulate, set "
    "max_micro_batch of the policy",
    waiting="The body of the loop runs once per micro-batch, and not at all on a rank without data: call no collective "
    "in it, but once after the loop (average_by_samples), and leave the loop on all ranks alike (stop_at of the "
    "loader)",
)


def _failures() -> int:
    """How often the device's allocator has failed in this process."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats().get("num_ooms", 0))


class LoadBalance:
    """How the global batch is divided among the ranks. Make one per training, after ``hvd.init()``, alike on all ranks.

    Parameters
    ----------
    policy
        A name (``"bsp"``, ``"lb-bsp"``, ``"self-adaptive"``, ``"non-blocking"``, ``"elastic-bsp"``) or a policy object
        (``StaticAllocation([3, 7])``).
    global_batch
        Samples per round over all ranks together: what one process would call its batch size. (Under ElasticBSP, of one
        iteration of every rank.)
    sync
        ``"allreduce"``, ``"d-psgd"`` or ``"matcha"``, or one of the last two with a graph of your own
        (``hvd_hetero.topology.mixing``).
    telemetry
        Where rank 0 writes one JSON line per round (``docs/telemetry.md``). None: nowhere.
    check_body
        Whether to look, in the first two rounds, at what the loop's body does beside its batch, and a rank without data
        would not do: collectives, changes of learning rates or parameters. An error if the data show that it will lack
        it, a warning if that may be.
    patience
        How long a rank waits for others before it says for which one, and before it ends the job if that cannot go on
        (``hvd_hetero.watchdog.Patience``, ``docs/waiting.md``). None: as ``HVD_HETERO_PATIENCE`` says, or the defaults.
    """

    def __init__(
        self,
        policy: str | Policy = "lb-bsp",
        *,
        global_batch: int | None = None,
        sync: str | Mixing = "allreduce",
        telemetry: str | Path | None = None,
        patience: Patience | None = None,
        check_body: bool = True,
        **others: Any,
    ) -> None:
        refuse(others, LOAD_BALANCE, "LoadBalance")
        if global_batch is None:
            raise TypeError(
                "global_batch is missing: the samples of a round over all ranks together; with batch_size on each "
                "rank so far, write global_batch=batch_size * hvd.size()"
            )
        if not hvd.is_initialized():
            raise ValueError("Horovod is not initialised; call hvd.init() before LoadBalance(…)")
        self._training = Session(
            policy, hvd.rank(), hvd.size(), global_batch, telemetry, sync=sync, wire=hvd, patience=patience,
            waits_in=("horovod.", "torch_hooks.wires.waiting"),
        )  # fmt: skip
        self.policy = self._training.policy
        self.balancer = self._training.balancer
        self.balancer.ways_out = _WAYS_OUT
        self.prefix = self._training.prefix
        self.mixing = self._training.mixing
        self.optimizer: DistributedOptimizer | None = None
        self.body = Body(wanted=check_body and hvd.size() > 1)
        """of the loop"""
        self.earlier: tuple[Balancer, ...] = ()
        """of the optimizers that step before this one in the same loop"""
        self._patience = patience
        self._others: list[LoadBalance] = []
        self._first: weakref.ref[LoadBalance] | None = None
        self.waits_in_layers = False
        """whether layers wait for other ranks, so that none may leave out a micro-batch"""
        self._parts = 0
        self._cramped = False
        self._survives = False
        self._micro_batches = 0
        self._failures_seen = _failures()

    @property
    def rounds(self) -> int:
        """Rounds that all ranks have finished. The same number on every rank: the place to stop a loop early."""
        return self.balancer.rounds

    @property
    def plan(self) -> tuple[int, ...]:
        """Samples of every rank in the round at hand (between rounds: in the next one)."""
        return self.balancer.plan().samples

    @property
    def batch_size(self) -> int:
        """Samples of this rank in the round at hand (between rounds: in the next one)."""
        return self.plan[self.balancer.rank]

    @property
    def round_complete(self) -> bool:
        """Whether ``step()`` really steps now, or has just done so; False while micro-batches are still gathered."""
        return not self.balancer.between_updates

    def also(self) -> LoadBalance:
        """Return the ``LoadBalance`` of one more optimizer in the same loop. It takes part in each round of this one.

            balance = LoadBalance(global_batch=128)                                  # for the loader, too
            optimizer_d = DistributedOptimizer(optimizer_d, balance, d.named_parameters())
            optimizer_g = DistributedOptimizer(optimizer_g, balance.also(), g.named_parameters())

        The samples, and so the weights, are those of this one's plan. A rank without data takes part in the order in
        which these objects were made, which must be that of the steps. Every optimizer steps once for every batch. A
        loss may reach the parameters of an optimizer that has stepped already; what it brings is cleared with the next
        round. Optimizers that step in turn, each seeing what the former has updated, need rounds of one micro-batch.
        """
        if self._first is not None:
            raise ValueError("this LoadBalance was made by also(); call also() of the one that the loader has")
        plan = self.balancer.plan()
        if plan.ends == "first" or plan.local or self.mixing is not None:
            what = f"policy {self.policy.name!r}" if self.mixing is None else "averaging with neighbours"
            raise ValueError(
                "several optimizers need gradients that are summed over the ranks, and rounds that end when all ranks "
                f"are done, which {what} has not; use sync='allreduce' and policy='lb-bsp' or 'bsp'"
            )
        if self.balancer.in_round:
            raise RoundStateError("also() in the middle of a round; call it between rounds")
        other = LoadBalance(BSP(), global_batch=self.balancer.global_batch, patience=self._patience)
        other.body = self.body
        other.earlier = (self.balancer, *(former.balancer for former in self._others))
        other._first = weakref.ref(self)
        self._others.append(other)
        return other

    @property
    def optimizers(self) -> list[DistributedOptimizer]:
        """Those of the loop that are wrapped by now."""
        return [each.optimizer for each in (self, *self._others) if each.optimizer is not None]

    @property
    def at_work(self) -> bool:
        """Whether any optimizer of the loop has still to step for the batch at hand."""
        first = self if self._first is None else self._first()
        return first is not None and any(each.balancer.at_work for each in (first, *first._others))

    def batch(self, samples: int) -> None:
        """Announce a batch of the user's own making, before its forward pass: one micro-batch, one round.

        For data that does not come from a ``BalancedLoader``. The gradient is weighted by the samples given here,
        whatever was planned (``batch_size`` tells the plan); 0 is allowed, and then a loss of zero must still be
        propagated, so that this rank takes part in the synchronisation.
        """
        self.require_first("balance.batch()")
        another_batch(self.body)
        samples = integer("samples", samples, 0, way_out="give the number of samples in this rank's batch, 0 for none")
        plan = self.balancer.plan()
        if plan.ends == "first" or plan.local:
            raise ValueError(
                f"policy {self.policy.name!r} gives a rank several micro-batches in a round, which only a "
                "BalancedLoader can hand out; use one, or policy='bsp' or 'lb-bsp'"
            )
        if self.policy.needs_epochs:
            raise ValueError(
                f"policy {self.policy.name!r} learns when an epoch ends, and batch() has none; give it every=…, in "
                "rounds, or use a BalancedLoader"
            )
        self.begin(MicroBatch(self.balancer.plan(), samples))

    def require_first(self, what: str) -> None:
        """Raise if this was made by ``also()``: its batches are those of another."""
        if self._first is not None:
            raise ValueError(
                f"{what} of a LoadBalance that was made by also(), which has the batches of the first one; use that one"
            )

    def begin(self, work: MicroBatch, input_s: float = 0.0, *, cramped: bool = False) -> None:
        """A micro-batch begins (the loader's way of saying so); ``cramped``: right after one that did not fit."""
        if self.optimizer is None:
            raise ValueError(
                "no optimizer synchronises this LoadBalance, so the ranks would drift apart in silence; wrap yours: "
                "optimizer = DistributedOptimizer(optimizer, balance, named_parameters=model.named_parameters())"
            )
        self._warn_unprotected()
        self._cramped = cramped
        self._parts = 0  # of one that failed, and was abandoned
        self.balancer.begin(work, input_s)
        self.optimizer.begin_micro_batch()
        for other in self._others:
            other.begin(work)

    def enter_body(self, differs: Differs) -> None:
        """The loop's body begins, and is looked at; ``differs``: why it does not run equally often on all ranks."""
        self.body.enter(self.rounds, [each.optimizer for each in (self, *self._others)], differs)

    def idle_round(self) -> None:
        """End a round without data (the loader's doing, where the loop's body does not run)."""
        assert self.optimizer is not None, "begin() has checked it"
        self.optimizer.idle_round()
        for other in self._others:
            other.idle_round()

    def abandon_round(self) -> None:
        """Forget what an unfinished round has gathered."""
        for optimizer in self.optimizers:
            optimizer.abandon_round()

    @contextmanager
    def surviving_out_of_memory(self) -> Iterator[None]:
        """Around the body of the loop: a micro-batch that does not fit in memory is done again in smaller parts.

            for x, y in loader:
                with balance.surviving_out_of_memory():
                    ...

        The loader then yields the same samples in parts, and the plans keep to what fits, with headroom, from the next
        round on. For batches of a ``BalancedLoader``. The body must do all of its work with a batch inside the block,
        and, up to ``optimizer.step()``, nothing that cannot be done twice. While micro-batches are accumulated, it
        costs a copy of the gradients. More in ``docs/gpu.md``.
        """
        self._survives = True
        try:
            if self.optimizer is not None:
                self.optimizer.guard_micro_batch()
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._parts = self._undo(error)
            traceback.clear_frames(error.__traceback__)  # of functions that have ended: they hold activations

    def _undo(self, error: Exception) -> int:
        """Forget the micro-batch at hand, which has run out of memory. Returns how large its parts may be."""
        balancer, work = self.balancer, self.balancer.work
        if self._others:
            raise self._out_of_memory("with several optimizers, whose batches are not done again") from error
        if not (balancer.computing and self.optimizer is not None):
            raise self._out_of_memory("after its last gradient had left, which is not done again") from error
        if work.round < 0:
            raise self._out_of_memory("with a batch of your own, which only a BalancedLoader could cut") from error
        if not self.optimizer.undo_micro_batch():
            raise self._out_of_memory("while its gradients were exchanged or applied") from error
        parts = balancer.out_of_memory(cramped=self._cramped)
        self._failures_seen = _failures()
        logger.warning(
            "round %d: rank %d ran out of memory with %d samples; they are done in parts of at most %d, and its "
            "micro-batches hold at most %d from now on", self.rounds, balancer.rank, work.samples, parts,
            balancer.meter.limit,
        )  # fmt: skip
        return parts

    def _out_of_memory(self, when: str) -> HeteroError:
        return HeteroError(
            f"round {self.rounds}: rank {self.balancer.rank} ran out of memory {when}; set max_micro_batch of the "
            f"policy below {self.balancer.work.samples}, or free memory"
        )

    def take_parts(self) -> int:
        """How large the parts may be in which the micro-batch just yielded is to be done again; 0: it is done."""
        parts, self._parts = self._parts, 0
        if parts:
            # Only now has the loop let go of the exception, whose traceback holds tensors of the failed attempt.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return parts

    def _warn_unprotected(self) -> None:
        """Once: shares are about to grow until something does not fit, and nothing would survive that."""
        self._micro_batches += 1
        if self._micro_batches == 2 and not self._survives and self.balancer.meter.profile is not None:
            logger.warning("policy %r tries larger batches than you have tried, %s", self.policy.name, _WAY_OUT)

    def left(self) -> None:
        """The loop's body was left while it computed: say what could have been done, if memory was short."""
        if self.balancer.computing and _failures() > self._failures_seen:
            logger.error(
                "round %d: rank %d has run out of memory with %d samples, %s", self.rounds, self.balancer.rank,
                self.balancer.work.samples, _WAY_OUT,
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Plans, policy and every rank's predictor, as plain data; a collective call, alike on all ranks."""
        mine = self.balancer.state_dict()
        paces = hvd.allgather_object(mine.pop("pace"), name=f"{self.prefix}.paces")
        return {**mine, "paces": paces}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another job left off; before the first round, and on every rank."""
        paces = state["paces"]
        if len(paces) != hvd.size():
            raise ValueError(
                f"the state is of {len(paces)} ranks, this job has {hvd.size()}; launch as many, or "
                "begin anew with the model's parameters alone"
            )
        self.balancer.load_state_dict({**state, "pace": paces[hvd.rank()]})

    def close(self) -> None:
        """Finish the telemetry, the signals and the watchdog. Done by itself when the process ends."""
        for each in (self, *self._others):
            each._training.close()
