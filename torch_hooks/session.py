"""A round as PyTorch runs it: where loader, optimizers and layers meet, which know nothing of each other.

Each optimizer of a training loop has a session. The first one's is the loader's too, and leads the others'
(``LoadBalance.also``): they take part in each of its rounds.
"""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hvd_hetero.balancer import Balancer
from hvd_hetero.consistency import Remedies
from hvd_hetero.errors import RoundStateError
from hvd_hetero.evaluation import EvaluationSpeeds
from hvd_hetero.policies.policy import Policy
from hvd_hetero.rounds import MicroBatch
from hvd_hetero.session import Session
from hvd_hetero.telemetry.ledger_reader import seed_generators
from torch_hooks.beside.scaled_rounds import ScaledRounds
from torch_hooks.beside.stepping_optimizers import Reducer
from torch_hooks.gradients.gathered import Gathered
from torch_hooks.out_of_memory import Shortage
from torch_hooks.wires.choice import TorchWire

if TYPE_CHECKING:
    from hvd_hetero.policies.goodput import Goodput
    from hvd_hetero.telemetry.writer import Telemetry

_REMEDIES = Remedies(
    fingerprint="Give all ranks the same policy, global_batch, dataset (of their own: stream='shard'), seed, "
    "num_workers and prefetch_factor, let them leave an epoch at the same round (stop_at of the loader), and freeze "
    "parameters on all of them at once",
    settings="The body of the loop runs once per micro-batch, and a rank without data skips it: do what belongs "
    "to an update, such as scheduler.step(), in optimizer.register_step_post_hook(…), or once per epoch",
    parameter_norm="The body of the loop does not run on a rank without data: change gradients, as clipping does, in "
    "optimizer.register_step_pre_hook(…), and let all ranks change parameters alike",
    unused="Call optimizer.step() once for every batch, also for one that you would rather skip; to accumulate, set "
    "max_micro_batch of the policy",
    waiting="The body of the loop runs once per micro-batch, and a rank without data skips it: call no collective "
    "in it, but once after the loop (average_by_samples), and leave the loop on all ranks alike (stop_at of the "
    "loader)",
    memory="use a smaller model, or, if it fits by itself, put the loop's body in a function, so that no variable "
    "keeps what a failed attempt had",
)

WEIGHT_OF_SUMS = (
    "{} needs averaged gradients, and rounds that end when all ranks are done, which policy {!r} with this sync "
    "does not have; leave it out, or use policy='lb-bsp' and sync='allreduce'"
)


class RoundOptimizer(Protocol):
    """What a session asks of an optimizer."""

    _gathered: Gathered

    def _begin_micro_batch(self) -> None:
        """Begin a micro-batch."""

    def _idle_round(self) -> None:
        """End a round without data."""

    def _discard_round(self) -> None:
        """Forget what an unfinished round has gathered."""

    def close(self) -> None:
        """Let go of the parameters and of the session."""


class TorchSession(Session):
    """The rounds of one optimizer of this rank, and of those that it leads."""

    def __init__(
        self,
        policy: str | Policy,
        wire: TorchWire,
        global_batch: int | Goodput,
        telemetry: str | os.PathLike[str] | Telemetry | None = None,
        *,
        reducer: Reducer = "mean",
        **options: Any,
    ) -> None:
        super().__init__(
            policy, wire.rank, wire.size, global_batch, telemetry, wire=wire, waits_in=wire.waits_in,
            collective_timeout_s=wire.collective_timeout_s, thread_group=wire.thread_group, device=_device_here(),
            **options,
        )  # fmt: skip
        self.wire = wire
        self.balancer.agreement.remedies = _REMEDIES
        self.evaluation = EvaluationSpeeds(self.balancer)
        self.shortage = Shortage(self.balancer)
        self.optimizer: RoundOptimizer | None = None
        self.beside: ScaledRounds | None = None
        """The rounds, if gradients are reduced by what the user has: no optimizer is ours."""
        self.closed: Callable[[], None] = do_nothing
        """What notes that a round beside a reducer is closed: the reader of its batch."""
        self._reducer = reducer
        self.batches_at_most = 0
        """Batches that the loop draws from a loader of unknown length, if what runs it has said so."""
        self.normalises_together = False
        """Whether the model has a ``SyncBatchNorm`` of this package."""
        self.waits_in_layers = False
        """Whether layers wait for other ranks, so that none may leave out a micro-batch."""
        self._others: list[TorchSession] = []
        self._leader: weakref.ref[TorchSession] | None = None

    @property
    def optimizers(self) -> list[RoundOptimizer]:
        """The optimizers of the loop that are wrapped so far."""
        return [each.optimizer for each in (self, *self._others) if each.optimizer is not None]

    @property
    def stepping_before(self) -> tuple[Balancer, ...]:
        """The balancers of the optimizers that step before this one in the same loop."""
        first = None if self._leader is None else self._leader()
        loop = [] if first is None else [first, *first._others]
        return tuple(each.balancer for each in itertools.takewhile(lambda each: each is not self, loop))

    @property
    def at_work(self) -> bool:
        """Whether any optimizer of the loop has still to step for the batch at hand."""
        first = self if self._leader is None else self._leader()
        return first is not None and any(each.balancer.at_work for each in (first, *first._others))

    @property
    def can_split_micro_batches(self) -> bool:
        """Whether this rank may do a micro-batch in parts: no layer waits for others, and a user's loop survives it."""
        waits = self.waits_in_layers if self.beside is None else self.normalises_together
        return not waits and (self.beside is None or self.beside.redone.possible)

    def require_first(self, what: str) -> None:
        """Raise if this was made by ``also()``, and so uses the batches of another one."""
        if self._leader is not None:
            raise ValueError(
                f"{what} needs the LoadBalance of the loader, and not one made by also(); use the one that also() was "
                "called on"
            )

    def require_leadable(self) -> None:
        """Raise if other optimizers cannot take part in the rounds of this one."""
        if self._leader is not None:
            raise ValueError("this LoadBalance was made by also(); call also() of the one that the loader has")
        if not self.sums_gradients:
            raise ValueError(
                f"also() needs summed gradients, and rounds that end when all ranks are done, which {self.averaging} "
                "does not have; use sync='allreduce' and policy='lb-bsp' or 'bsp'"
            )
        if self.balancer.in_round:
            raise RoundStateError("also() was called in the middle of a round; call it between rounds")

    def follow_with(self, other: TorchSession) -> None:
        """Let the other optimizer take part in each round of this one, after those that do so already."""
        other._leader = weakref.ref(self)
        self._others.append(other)

    def trains_here(self) -> None:
        """Note that the calling thread trains: the watchdog shows its stack if training stops."""
        super().trains_here()
        for each in self._others:
            each.trains_here()

    def begin(
        self, work: MicroBatch, input_s: float = 0.0, *, memory_in_use: bool = False, more_parts: bool = False
    ) -> None:
        """Begin a micro-batch; ``memory_in_use``: right after one that did not fit; ``more_parts``: others follow."""
        self.shortage.begins(memory_in_use=memory_in_use)
        if self.balancer.ledger is not None and (seed := self.balancer.ledger.seed(work)) is not None:
            seed_generators(seed)
        if self.beside is not None:
            self.beside.begin(work, input_s, more_parts=more_parts)
            return
        assert self.optimizer is not None, "else rounds go beside a reducer"
        self.balancer.begin(work, input_s)
        self.optimizer._begin_micro_batch()
        for other in self._others:
            other.begin(work)

    def require_no_ledger(self) -> None:
        """Raise if a ledger is kept beside a reducer, whose losses are means over something else than samples."""
        if self.balancer.ledger is not None:
            raise ValueError(
                "Telemetry(ledger=True) beside a reducer of your own counts samples, and weight_of, weight and "
                "normalised of scale(), and a Trainer's loss over tokens count something else; leave ledger out, or "
                "use a DistributedOptimizer"
            )

    def announce(self, weight: float) -> None:
        """Tell the other ranks what this one's part of a round counts, beside a reducer."""
        self.require_no_ledger()
        assert self.beside is not None, "else weights travel with the gradients"
        self.beside.loss_factors.announce(weight)

    def weigh(self, loss: torch.Tensor, weight: Any) -> None:
        """Set what the current batch's mean loss is over, such as its number of tokens, in place of its samples."""
        if self.beside is not None:
            self.beside.require_turn(loss)
        number, work = float(weight), self.balancer.work
        if not self.sums_gradients:  # else the samples that a rank has done say which are left
            raise ValueError(WEIGHT_OF_SUMS.format("weight of scale()", self.policy.name))
        if self.shortage.survives:
            raise ValueError(
                "weight of scale() does not go with surviving_out_of_memory(), which may do a batch again in parts; "
                "give the loader weight_of=…, which weighs each part"
            )
        if not 0.0 <= number < math.inf:
            raise ValueError(
                f"weight must be finite and at least 0, got {number}; give the number of tokens that the loss is a "
                "mean of"
            )
        if work.weight == number:
            return  # of another loss, for another optimizer
        if work.weight is not None:
            raise ValueError(
                f"the batch has the weight {work.weight:g} already, from weight_of of the loader or another scale(); "
                f"leave weight={number:g} out"
            )
        most = max(work.plan.micro_batches)
        if self.balancer.between_updates or most > 1:
            raise ValueError(
                f"weight of scale() needs rounds of one batch on each rank, and this round has up to {most} (by "
                f"policy {self.policy.name!r}, max_micro_batch, max_micro_batch_cost or micro_batches); give the "
                "loader weight_of=… instead"
            )
        if self.beside is not None:
            self.announce(number)
        for each in (self, *self._others):
            each.balancer.weigh(number)

    def require_reducer(self) -> None:
        """Prepare to train beside the user's reducer if there is no DistributedOptimizer; raise if that cannot work."""
        if self.optimizer is not None or self.beside is not None:
            return
        if self._others:
            raise ValueError(
                "also() is for optimizers that DistributedOptimizer wraps; wrap them, or scale the sum of all losses "
                "beside your own reducer"
            )
        some_idle = self.policy.may_rest or not all(self.balancer.plan().samples)
        if some_idle or not (self.policy.shares_alone and self.sums_gradients):
            raise ValueError(
                f"{self.averaging} needs DistributedOptimizer, because ranks would do unequal numbers of micro-batches "
                "or not sum gradients. Wrap the optimizer before the loop: optimizer = DistributedOptimizer(optimizer, "
                "balance, model.named_parameters()). Beside your own reducer use 'lb-bsp', 'bsp' or StaticAllocation "
                "of positive weights, with sync='allreduce'"
            )
        self.beside = ScaledRounds(
            self.balancer, self.wire, self.prefix, self._reducer, depends_on_time=self.depends_on_time
        )  # fmt: skip
        self.balancer.planner.require_equal_counts(1, exactly=False)
        self.shortage.end_others = self.end_others
        self.waits_in_layers = self.wire.size > 1

    def end_batch(self) -> None:
        """Close the round beside a reducer, if the loop's body is done with its last batch."""
        if self.beside is not None and self.beside.end_batch():
            self.closed()

    def exit_loop(self) -> None:
        """Close the round beside a reducer if its last batch was used, wherever the loop was left."""
        if self.beside is not None and self.beside.exit_loop():
            self.closed()

    def drain(self) -> None:
        """Compare what has not been compared yet; a collective call."""
        if self.beside is not None:
            self.beside.drain()

    def idle_round(self) -> None:
        """End a round without data, in which the loop's body does not run."""
        for optimizer in self.optimizers:
            optimizer._idle_round()

    def discard_round(self) -> None:
        """Forget what an unfinished round has gathered."""
        for optimizer in self.optimizers:
            optimizer._discard_round()
        if self.beside is not None:
            self.beside.discard_round()

    def close(self) -> None:
        """Compare the last rounds, and finish the telemetry and the watchdog."""
        try:
            if self.beside is not None:
                self.beside.finish()
        finally:
            super().close()
            for each in self._others:
                each.close()
            if self.beside is not None:
                self.beside.close()


def _device_here() -> tuple[str, float]:
    """Return the name of this rank's device, and the size of its memory in bytes; 0: not known."""
    if not torch.cuda.is_available():
        return "cpu", 0.0
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(properties.name), float(properties.total_memory)


def do_nothing() -> None:
    """Do nothing: the end of a batch that the user has drawn needs no work."""
