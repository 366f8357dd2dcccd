r"""Rounds beside a reducer that is not ours: DDP, FSDP2, or a stock ``hvd.DistributedOptimizer``.

**The loss factor.** Rank i of n has b_ij of a round's B samples in its micro-batch j, with the mean loss L_ij. The loss
is multiplied by n b_ij / B, so a reducer that takes the mean of the ranks makes

    (1 / n) sum_i sum_j (n b_ij / B) dL_ij = d (1 / B) sum_ij b_ij L_ij,

the gradient of one process. A reducer that sums needs b_ij / B. A term that does not depend on the batch, as weight
decay in the loss, keeps its weight, for the factors of all ranks average to 1. Where the loss is a mean over w_ij of
something else, such as tokens, w_ij / W takes the place of b_ij / B. W, the sum over all ranks, is known when all have
drawn the batches of the round: it travels behind the forward pass, and ``scale`` waits for it.

**The time** of a micro-batch, and what happens when:

    batch drawn   forward   scale()   backward             waiting         update   next batch drawn
    begin()                           _gradients_there()   _backward_over()   hooks    end_batch(): row, table, plan

Horovod's reducer waits in ``step()``, between the step of its optimizer and that of the one inside.
"""

from __future__ import annotations

import enum
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hvd_hetero.balancer import Balancer
from hvd_hetero.consistency import Remedies
from hvd_hetero.errors import RoundStateError
from hvd_hetero.rounds import MicroBatch
from torch_hooks.beside.comparison import Comparison
from torch_hooks.beside.layers import hides_a_backward_pass, leave_out_waits
from torch_hooks.beside.leaves import Leaves
from torch_hooks.beside.local_squares import Noise
from torch_hooks.beside.loss_factors import LossFactors
from torch_hooks.beside.redone import Redone
from torch_hooks.beside.stepping_optimizers import Reducer, SteppingOptimizers
from torch_hooks.beside.steps import IN_BETWEEN, Steps
from torch_hooks.cuda_stopwatch import DeviceTimes
from torch_hooks.gradients.parameter_norm import kernels_here
from torch_hooks.wires.choice import TorchWire

logger = logging.getLogger(__name__)

_REMEDIES = Remedies(
    fingerprint="Give all ranks the same policy, global_batch, dataset (of their own: stream='shard'), seed, "
    "num_workers and prefetch_factor, and let them leave an epoch at the same round (stop_at of the loader)",
    settings="Change learning rates on all ranks alike, in the same round",
    parameter_norm="Reduce all gradients over all ranks: wrap the model in DistributedDataParallel or fully_shard, or "
    "the optimizer in hvd.DistributedOptimizer, and change parameters on all ranks alike",
    unused="Call balance.scale(loss).backward() once for every batch",
    waiting="Let all ranks call the same collectives in the same order, and leave the loop on all ranks alike (stop_at "
    "of the loader)",
    memory="use a smaller model, or set max_micro_batch of the policy",
)
_NOT_SCALED = (
    "the loss of the last batch was not scaled. Write balance.scale(loss).backward() for every batch before you draw "
    "the next, with 0 * loss for one to skip; in Lightning give callbacks=[ScaleLoss(balance)], in a Trainer end "
    "compute_loss in super().compute_loss. To validate, use balance.evaluate(dataset, function). Or wrap the optimizer "
    "before the loop: optimizer = DistributedOptimizer(optimizer, balance, model.named_parameters())"
)
_NOT_BACKWARD = (
    "the scaled loss of the last batch was not used, so other ranks would wait for its gradient; call "
    "balance.scale(loss).backward() once for every batch"
)
_LEFT_OVER = (
    "the loop was left in the middle of a round, and gradients of its first part are still there. The round begins "
    "again, so call optimizer.zero_grad() before the next batch"
)

# Rounded to these types, the loss factors of all ranks do not average to 1.
_HALF = (torch.float16, torch.bfloat16)


class _Stage(enum.Enum):
    DRAWN = "not scaled"
    SCALED = "scaled"
    OVER = "its backward pass is over, and so is the reducer's waiting in it"


class ScaledRounds:
    """One rank's rounds. Made on all ranks alike, before the first batch is drawn.

    ``depends_on_time``: it matters to the policy when work is done.
    """

    def __init__(
        self, balancer: Balancer, wire: TorchWire, prefix: str, reducer: Reducer, *, depends_on_time: bool
    ) -> None:
        balancer.agreement.remedies = _REMEDIES
        balancer.agreement.kernels = kernels_here()
        self._balancer, self._meter = balancer, balancer.meter
        self._meter.defers_work = False
        self._times = DeviceTimes(balancer.policy.name, self._meter, needed=depends_on_time)
        line, trained = wire.new_group(), SteppingOptimizers(balancer, reducer)
        self.loss_factors = LossFactors(balancer, line, prefix, reducer)
        self.steps = Steps(balancer, trained)
        self._leaves = Leaves(trained)
        self._noise = Noise(balancer, trained, self.loss_factors.divisor)
        self._comparison = Comparison(balancer, line, prefix, trained, self._noise)
        self.redone = Redone()
        self._stage = _Stage.OVER
        self._loss_factor = 0.0
        """That of the batch (`LossFactors`)."""
        self._failed: Exception | None = None
        """An error found where nothing can be raised, until the next call."""
        self._looked = balancer.rank > 0
        """Whether a reentrant checkpoint was looked for; rank 0 warns for all."""
        hooks = leave_out_waits(self._meter) if wire.size > 1 else []
        self._let_go = weakref.finalize(self, _remove, hooks)
        self._let_go.atexit = False
        _hook_all_optimizers()

    def finish(self) -> None:
        """Compare the last rounds, which were not compared yet, if all ranks come here, too."""
        self._require_whole()
        if self.done and not sys.is_finalizing():
            self._comparison.finish()

    def _require_whole(self) -> None:
        """Raise the error that was found when the loop was left."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def close(self) -> None:
        """Remove all hooks of this training."""
        self._let_go()
        _here.at_work = [weakref.ref(each) for each in _at_work() if each is not self]

    @property
    def done(self) -> bool:
        """Whether the batch's backward pass is over: its gradients are there and, at the end of a round, reduced."""
        return self._stage is _Stage.OVER

    def begin(self, work: MicroBatch, input_s: float, *, more_parts: bool = False) -> None:
        """Begin a batch that was drawn after ``input_s`` seconds of waiting; ``more_parts``: others follow it."""
        self._require_whole()
        self.redone.begin(first=not self._balancer.in_round, more_parts=more_parts)
        if more_parts:
            self._leaves.stop_watching()  # what the round has gathered is not where it was
        _here.at_work = [*(weakref.ref(each) for each in _at_work() if each is not self), weakref.ref(self)]
        self._stage = _Stage.DRAWN
        self.steps.begin_batch()
        self._noise.begin_batch(work)
        self._balancer.begin(work, input_s)

    def end_batch(self) -> bool:
        """Return whether a round ends, now that the loop's body is done with its batch."""
        self.steps.end_batch()
        if not self._balancer.computing:
            return False
        if not self.done:
            raise RoundStateError(_NOT_SCALED if self._stage is _Stage.DRAWN else _NOT_BACKWARD)
        last = self._balancer.work.last
        if last:
            self._leaves.stop_watching()
            self._comparison.close_round()
        else:
            self._leaves.keep_watch()
            self._balancer.pause()
        return last

    def exit_loop(self) -> bool:
        """Return whether leaving the loop ends a round: the body was done with its last batch."""
        # An iteration that is collected as the interpreter ends can send nothing any more: that aborted the process.
        if not (self._balancer.closing and self.done) or sys.is_finalizing():
            return False
        try:
            return self.end_batch()
        except Exception as error:  # noqa: BLE001 - Python drops what is raised where a generator is closed
            logger.error("%s", error)
            self._failed = error
            return True

    def drain(self) -> None:
        """Compare all finished rounds, where all ranks have come to the end of an iteration; a collective call."""
        self._require_whole()
        self._comparison.drain()

    def discard_round(self) -> None:
        """Forget an unfinished round."""
        self.steps.end_batch()
        if self._balancer.in_round:
            self._balancer.discard_round()
            for part in (self._noise, self._leaves, self.loss_factors, self.steps, self.redone):
                part.forget()

    def scale(self, loss: torch.Tensor, *, normalised: bool = False) -> torch.Tensor:
        """Return the loss times its loss factor; as it is, if ``normalised``."""
        if normalised:
            self._noise.leave_out()
        self._take(loss)
        scaled = loss.float() if loss.dtype in _HALF else loss
        if not self._loss_factor:
            # A mean over no samples is NaN, and stays NaN times 0.
            scaled = torch.nan_to_num(scaled)
        scaled = scaled * (1.0 if normalised else self._loss_factor)
        # The first hook that a backward pass runs.
        scaled.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]
        return scaled

    def weigh(self, loss: torch.Tensor, factor: float) -> None:
        """Multiply the gradient of this very loss, in its backward pass, by its loss factor and by ``factor``."""
        if loss.dtype in _HALF:
            raise ValueError(
                f"loss must have 32 bits or more, because weights of ranks do not sum to 1 in {loss.dtype}; give "
                "loss.float()"
            )
        self._noise.leave_out()
        self._take(loss)
        product = factor * self._loss_factor

        def begins(gradient: torch.Tensor) -> torch.Tensor:
            self._backward_begins(gradient)
            return gradient * product

        loss.register_hook(begins)  # type: ignore[no-untyped-call]

    def require_turn(self, loss: torch.Tensor) -> None:
        """Raise unless this loss is the one of the batch at hand, and about to be propagated."""
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"loss must be a tensor, got {type(loss).__name__}; give what the loss function returns")
        if loss.numel() != 1:
            raise ValueError(
                f"loss must be one number, the mean over this rank's batch, got shape {tuple(loss.shape)}; scale "
                "loss.mean()"
            )
        if not (loss.requires_grad and torch.is_grad_enabled()):
            raise ValueError(
                "loss has no gradient: it was computed or scaled under torch.no_grad(), or from nothing that is "
                "trained; scale only the loss that is propagated back"
            )
        if not self._balancer.computing:
            raise RoundStateError("scale() was called without a batch; call it in the loop over the BalancedLoader")
        if self._stage is not _Stage.DRAWN:
            raise self.steps.twice()
        if self._leaves.cleared:
            raise RoundStateError(f"zero_grad() {IN_BETWEEN}")

    def _take(self, loss: torch.Tensor) -> None:
        """Take the loss of the current batch, and compute its loss factor."""
        self.require_turn(loss)
        self._loss_factor = self.loss_factors.of_batch()
        self._times.include({loss: "the loss"})
        if not self._looked:
            self._looked = True
            if hides_a_backward_pass(loss):
                logger.warning(
                    "with reentrant checkpoints this rank's gradients may be complete only after "
                    "DistributedDataParallel has waited for other ranks, which then counts as this rank's own "
                    "time. Checkpoint with use_reentrant=False"
                )
        if self._loss_factor:
            self._comparison.look(loss)
        self.redone.scaled(loss, last=self._balancer.work.last)
        self._leaves.note(loss, last=self._balancer.work.last, several=len(_at_work()) > 1)
        self._meter.forward_done(self._balancer.work.samples)
        self._stage = _Stage.SCALED

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        if self._stage is _Stage.SCALED:
            # Not when the loss is scaled: zero_grad() may come between that and backward().
            if self._leaves.left_over:
                raise RoundStateError(_LEFT_OVER)
            self.redone.backward_begins(last=self._balancer.work.last)
            self._noise.backward_begins(gradient)
        # No reducer has queued a callback by now, so this one runs first: when this rank's last gradient is there, and
        # before other ranks are waited for.
        _queue(self._gradients_there)

    def _gradients_there(self) -> None:
        """Note that this rank's last gradient is there."""
        if self._stage is not _Stage.SCALED:
            return
        self._noise.backward_ends(self._loss_factor)
        work = self._balancer.work
        self._meter.done(work.samples, work.gradient_weight, work.figures)
        self._meter.reads = True
        # This callback runs behind those of the reducer, which wait for the other ranks.
        _queue(self._backward_over)

    def _backward_over(self) -> None:
        """Note that the backward pass is over, and with it the reducer's waiting for other ranks."""
        self._stage = _Stage.OVER
        self._meter.reads = False
        self._meter.add_wait(self._meter.batch.clock() - self._meter.batch.done_at)
        if self._balancer.closing:
            self._noise.complete()
        self.redone.backward_ends()
        self.steps.reduced()

    def guard(self) -> None:
        """Prepare to undo the micro-batch that has begun."""
        self.redone.guard(last=self._balancer.work.last)

    def undo(self) -> bool:
        """Undo the micro-batch that `guard` prepared for; return whether that was possible."""
        if self.done or not self.redone.undo():
            return False
        self._stage = _Stage.OVER
        self.steps.end_batch()
        self._noise.undo()
        self._leaves.stop_watching()
        return True

    def step_begins(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """Note that an optimizer begins a step in the thread that trains. ``closure``: it has one to call."""
        if self._balancer.in_round:
            self.steps.begins(optimizer, closure=closure, done=self.done)

    def reaches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether this batch's loss has gradients for what an optimizer changes."""
        return self._leaves.belong_to(optimizer)


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# at_work: the trainings of this thread that have drawn a batch, the latest one last. Ranks may be threads.
_here = threading.local()


def _at_work() -> list[ScaledRounds]:
    trainings = (each() for each in getattr(_here, "at_work", ()))
    return [each for each in trainings if each is not None and each._balancer.in_round]


def _trained_by(optimizer: torch.optim.Optimizer) -> list[ScaledRounds]:
    """Return the trainings of this thread to which a step belongs."""
    at_work = _at_work()
    return [beside for beside in at_work if beside.reaches(optimizer)] or at_work[-1:]


@cache
def _hook_all_optimizers() -> None:
    """Register hooks of every optimizer's step in this process: users need not say which one trains."""
    # What a compiler traced would hold for the rounds that it has seen. Keeping it off imports it, so not before here.
    ScaledRounds.scale = torch.compiler.disable(ScaledRounds.scale)  # type: ignore[method-assign, no-untyped-call]
    register_optimizer_step_pre_hook(torch.compiler.disable(_step_begins))  # type: ignore[no-untyped-call]
    register_optimizer_step_post_hook(torch.compiler.disable(_step_ends))  # type: ignore[no-untyped-call]


def _step_begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for beside in _trained_by(optimizer):
        beside.step_begins(optimizer, closure=any(map(callable, (*args[1:], *kwargs.values()))))


def _step_ends(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for beside in _at_work():
        beside.steps.ends(optimizer, done=beside.done)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
