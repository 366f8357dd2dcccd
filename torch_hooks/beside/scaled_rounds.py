r"""Rounds beside a reducer that is not ours: DDP, FSDP2, or a stock ``hvd.DistributedOptimizer``.

**The weight.** Rank i of n has b_ij of a round's B samples in its micro-batch j, with the mean loss L_ij. The loss
counts n b_ij / B, so a reducer that takes the mean of the ranks makes

    (1 / n) sum_i sum_j (n b_ij / B) dL_ij = d (1 / B) sum_ij b_ij L_ij,

the gradient of one process. A reducer that sums needs b_ij / B. A term that does not depend on the batch, as weight
decay in the loss, keeps its weight, for the weights of all ranks average to 1. Where the loss is a mean over w_ij of
something else, such as tokens, w_ij / W takes the place of b_ij / B. W, the sum over all ranks, is known when all have
drawn the batches of the round: it travels behind the forward pass, and ``scale`` waits for it.

**The time** of a micro-batch, and what happens when:

    batch drawn    forward    scale()    backward       waiting        update     next batch drawn
    begin()                                      done         reduced   hooks      leave(): row, table, plan

The scaled loss has a hook, the first that a backward pass runs. It queues a callback in autograd's engine, before any
reducer queues one that waits. So it runs when this rank's last gradient is there, and before other ranks are waited
for; where work is queued on a device, it records an event. It queues another callback, which runs behind those of the
reducer. Horovod's reducer waits in ``step()``, between the step of its optimizer and that of the one inside.
"""

from __future__ import annotations

import enum
import logging
import math
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hvd_hetero.balancer import WEIGHS_NOTHING, Balancer
from hvd_hetero.communication.wire import Handle
from hvd_hetero.consistency import WaysOut
from hvd_hetero.errors import RoundStateError
from hvd_hetero.late_tables import LateTables
from hvd_hetero.measurement.gradient_noise import ROUNDING
from hvd_hetero.rounds import MicroBatch
from torch_hooks.beside.layers import hides_a_backward_pass, leave_out_waits, leaves_of
from torch_hooks.beside.local_squares import LocalSquares
from torch_hooks.beside.reducer import Reducer, is_horovods
from torch_hooks.beside.trained import Trained, parameters_of
from torch_hooks.cuda_stopwatch import DeviceTimes
from torch_hooks.gradients.parameter_norm import kernels_here
from torch_hooks.rates import Rates
from torch_hooks.wires.choice import TorchWire

logger = logging.getLogger(__name__)

_WAYS_OUT = WaysOut(
    fingerprint="Give all ranks the same policy, global_batch, dataset (of their own: stream='shard'), seed, "
    "num_workers and prefetch_factor, and let them leave an epoch at the same round (stop_at of the loader)",
    settings="Change learning rates on all ranks alike, in the same round",
    witness="Reduce all gradients over all ranks: wrap the model in DistributedDataParallel or fully_shard, or the "
    "optimizer in hvd.DistributedOptimizer, and change parameters on all ranks alike",
    unused="Call balance.scale(loss).backward() once for every batch",
    waiting="Let all ranks call the same collectives in the same order, and leave the loop on all ranks alike (stop_at "
    "of the loader)",
    memory="use a smaller model, or set max_micro_batch of the policy",
)
_NOT_SCALED = (
    "the loss of the last batch was not scaled. Write balance.scale(loss).backward() for every batch, with 0 * loss "
    "for one to skip; in Lightning give callbacks=[ScaleLoss(balance)], in a Trainer end compute_loss in "
    "super().compute_loss. Or wrap the optimizer before the loop: optimizer = DistributedOptimizer(optimizer, balance, "
    "model.named_parameters())"
)
_NOT_BACKWARD = (
    "the scaled loss of the last batch was not used, so other ranks would wait for its gradient; call "
    "balance.scale(loss).backward() once for every batch"
)
_IN_BETWEEN = (
    "came in the middle of a round of several micro-batches; write: if balance.round_complete: optimizer.step(); "
    "optimizer.zero_grad()"
)
_TWICE = "scale() came twice for one batch, which would count twice; "
_ADDED = "add the losses, of several models too, and scale their sum"
_IN_TURN = (
    "models that step in turn need DistributedOptimizer, with balance.also() for the second. Optimizers that need two "
    "backward passes of a batch (SAM) do not go with unequal batches"
)
_REDUCED_BEFORE = (
    "step(closure) of hvd.DistributedOptimizer reduces gradients before it calls the closure. Call backward() before "
    "step(); or end the closure with optimizer.synchronize(), and step inside optimizer.skip_synchronize()"
)
_CLOSURE = (
    "the closure of step() has run again. Use an optimizer that calls it once: LBFGS decides by the loss of this rank "
    "alone how often it does"
)

_OWN_WEIGHT = (
    "weight of scale() is for rounds of one batch on each rank, from a loader without weight_of; give the loader "
    "weight_of=…, which tells all batches of a round before the first is used"
)
_NO_NOISE = (
    "global_batch=Goodput(…) could not measure the noise of gradients. Call optimizer.zero_grad() in each round beside "
    "DistributedDataParallel, or use torch_hooks.DistributedOptimizer without another reducer"
)

_LOOKED_AT = 2**13  # numbers of a gradient
_PATIENCE = 32  # tables in which no noise is known
_LEAVES = 4  # parameters that are looked at, of which some may be without gradient
_HALF = (torch.float16, torch.bfloat16)


class _Stage(enum.Enum):
    DRAWN = "not scaled"
    SCALED = "scaled"
    DONE = "all gradients of this rank are there"


class Beside:
    """One rank's rounds. Made on all ranks alike, before the first batch is drawn.

    ``goes_by_time``: it matters to the policy when work is done.
    """

    def __init__(
        self, balancer: Balancer, wire: TorchWire, prefix: str, reducer: Reducer, *, goes_by_time: bool
    ) -> None:
        balancer.ways_out = _WAYS_OUT
        balancer.kernels = kernels_here()
        meter = self._meter = balancer.meter
        meter.rests = False
        self._balancer = balancer
        self._wire = wire.line()
        self._prefix = prefix
        self._means_of = wire.size if reducer == "mean" else 1
        self._tables = LateTables(balancer)
        self._weights: tuple[Handle, Any] | None = None
        self._total = math.nan
        """What all batches of the round count, on all ranks, if not their samples."""
        self._call: tuple[Handle, Any] | None = None
        self._device = torch.device("cpu")
        self._times = DeviceTimes(balancer.policy.name, meter, needed=goes_by_time)
        self._stage = _Stage.DONE
        self._broken = False
        self._looked = self._balancer.rank > 0  # one rank tells
        hooks = leave_out_waits(meter) if wire.size > 1 else []
        self._rates = Rates(balancer)
        self._leaves: list[torch.Tensor] = []
        """Parameters that get gradients of this batch."""
        self._gathered: torch.Tensor | None = None
        """A parameter with a gradient of this round's former micro-batches."""
        self._reached: set[int] = set()
        """All that get gradients of this batch, where the loop has another training, too."""
        self._trained = Trained(balancer, reducer)
        self._squares: LocalSquares | None = None
        """What is measured in this round."""
        self._measured: LocalSquares | None = None
        """What was measured, until a row takes it along."""
        self._share = 0.0
        """What the gradient of the batch is multiplied by."""
        self._advanced = -1
        """The latest round whose update has begun."""
        self._steps: list[torch.optim.Optimizer] = []
        """Those inside step(): Horovod's optimizer steps around the one inside."""
        self._stepped = False
        """True: an optimizer has stepped with this batch's gradient."""
        self._update_began_at = math.nan
        self._let_go = weakref.finalize(self, _remove, hooks)
        self._let_go.atexit = False
        _hear_steps()

    def close(self) -> None:
        """Listen no more."""
        self._let_go()
        _here.at_work = [weakref.ref(each) for each in _at_work() if each is not self]

    # What the loader asks.

    def announce(self, weight: float) -> None:
        """Before a round begins: tell all ranks what this one's batches of it count together."""
        total = torch.tensor([weight], dtype=torch.float64)
        self._weights = self._wire.start_sum(total, f"{self._prefix}.weight"), total

    def begin(self, work: MicroBatch, input_s: float) -> None:
        """Begin a batch, which is drawn."""
        _here.at_work = [*(weakref.ref(each) for each in _at_work() if each is not self), weakref.ref(self)]
        self._stage, self._steps, self._stepped = _Stage.DRAWN, [], False
        every = self._trained.every
        if every and self._measured is None and not self._balancer.in_round and self._balancer.measures(every):
            samples = work.plan.total / self._means_of
            self._squares = LocalSquares(self._balancer.rounds, self._trained.parameters(), samples)
        self._balancer.begin(work, input_s)

    def leave(self) -> bool:
        """Return whether a round ends, now that the loop's body is done with its batch."""
        balancer = self._balancer
        self._rates.restore()  # after a step that has raised
        if not balancer.computing:
            return False
        if self._stage is not _Stage.DONE:
            raise RoundStateError(_NOT_SCALED if self._stage is _Stage.DRAWN else _NOT_BACKWARD)
        leaves, self._leaves, self._reached = self._leaves, [], set()
        if not balancer.work.last:
            leaves += [p for p in self._trained.parameters() if hasattr(p, "placements")]  # whose leaves are others
            self._gathered = next(filter(_has_gradient, leaves), None)
            balancer.pause()
            return False
        self._gathered = None
        self._tables.close_round()
        self._hear()
        self._trained.close_round()
        if self._tables.due:
            self._send()
        return True

    def break_off(self) -> bool:
        """Return whether leaving the loop ends a round: the body was done with its last batch."""
        # An iteration that is collected as the interpreter ends can send nothing any more.
        ends = self._balancer.closing and self._stage is _Stage.DONE and not sys.is_finalizing()
        return ends and self.leave()

    def settle(self) -> None:
        """Compare all finished rounds, where all ranks have come to the end of an iteration; a collective call."""
        self._hear()
        if self._tables.untold:
            self._send()
            self._hear()

    def abandon(self) -> None:
        """Forget an unfinished round."""
        self._rates.restore()
        if self._balancer.in_round:
            self._balancer.abandon()
            if self._squares is not None:
                self._squares.listening.close()
            self._leaves, self._reached = [], set()
            self._gathered = self._weights = self._squares = None
            self._advanced = -1

    # What the body of the loop asks.

    def scale(self, loss: torch.Tensor, weight: Any = None, *, normalised: bool = False) -> torch.Tensor:
        """Return the loss times its share of the round; as it is, if ``normalised``."""
        if normalised:
            self._measure_nothing()
        share = self._share_of(loss, weight)
        # In half precision, the weights of all ranks would not sum to what they should.
        scaled = loss.float() if loss.dtype in _HALF else loss
        if not share:
            scaled = torch.nan_to_num(scaled)  # the mean over nothing
        scaled = scaled * (1.0 if normalised else share)
        self._share = share
        scaled.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]
        return scaled

    def weigh(self, loss: torch.Tensor, factor: float) -> None:
        """Have the gradient of this very loss count by its share of the round, times ``factor``."""
        if loss.dtype in _HALF:
            raise ValueError(f"loss must have 32 bits, since shares do not sum to 1 in {loss.dtype}; give loss.float()")
        self._measure_nothing()
        weight = factor * self._share_of(loss)

        def begins(gradient: torch.Tensor) -> torch.Tensor:
            self._backward_begins(gradient)
            return gradient * weight

        loss.register_hook(begins)  # type: ignore[no-untyped-call]

    def _measure_nothing(self) -> None:
        """Leave out a gradient that others weigh, too."""
        self._squares = None
        if self._balancer.goodput is not None:
            raise ValueError(
                "global_batch=Goodput(…) goes by each rank's own gradient, which a normalised loss hides; scale the "
                "mean loss of this rank's batch, or give a global_batch that stays"
            )

    def _share_of(self, loss: torch.Tensor, own: Any = None) -> float:
        """Return the share of this batch's loss, which is about to be propagated, in the round; ``own``: its weight."""
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
            raise RoundStateError("scale() came without a batch; call it in the loop over the BalancedLoader")
        if self._stage is not _Stage.DRAWN:
            raise RoundStateError(_TWICE + (_CLOSURE if self._steps else _IN_TURN if self._stepped else _ADDED))
        if self._gathered is not None and not _has_gradient(self._gathered):
            raise RoundStateError(f"zero_grad() {_IN_BETWEEN}")
        share = self._part(own) * self._means_of
        if loss.device != self._device:
            self._times.include({loss: "the loss"})
            self._device = loss.device
        if not self._looked:
            self._looked = True
            if hides_a_backward_pass(loss):
                logger.warning(
                    "a reentrant checkpoint may hold the last gradients, and what DistributedDataParallel waits for "
                    "other ranks in it counts as this rank's work; checkpoint by use_reentrant=False"
                )
        if loss.device.type == "cpu" and share:
            self._broken |= not math.isfinite(loss.item())
        if not self._balancer.work.last:
            self._leaves = list(islice((p for p in leaves_of(loss) if isinstance(p, torch.nn.Parameter)), _LEAVES))
        if len(_at_work()) > 1:
            self._reached = set(map(id, leaves_of(loss)))
        self._meter.forward_done(self._balancer.work.samples)
        self._stage = _Stage.SCALED
        return share

    def _part(self, own: Any) -> float:
        """Return the part of the round that this batch is."""
        balancer, work = self._balancer, self._balancer.work
        if own is not None:
            weight = _checked(own)
            if work.weight is not None or balancer.between_updates or max(work.plan.micro_batches) > 1:
                raise ValueError(_OWN_WEIGHT)
            self.announce(weight)
            balancer.weigh(weight)
            work = balancer.work
        if self._weights is not None:
            (handle, total), self._weights = self._weights, None
            with self._meter.held_up():
                self._wire.wait(handle)
            self._total = float(total)
            if not self._total:
                raise ValueError(WEIGHS_NOTHING.format(balancer.rounds))
        return work.samples / work.plan.total if work.weight is None else work.weight / self._total

    # What autograd calls.

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        if self._squares is not None and self._stage is _Stage.SCALED:
            self._squares.begin(gradient)
        _queue(self._done)

    def _done(self) -> None:
        """Note that this rank's last gradient is there."""
        if self._stage is not _Stage.SCALED:
            return
        if self._squares is not None:
            self._squares.end(self._share)
        work = self._balancer.work
        self._meter.done(work.samples, work.counts, work.figures)
        self._meter.reads = True  # from here on it waits for others
        _queue(self._reduced)

    def _reduced(self) -> None:
        """Note that the backward pass is over."""
        self._stage = _Stage.DONE
        self._meter.reads = False
        now = self._balancer.now()
        self._meter.waited(now - self._meter.done_at)
        if self._balancer.closing and self._squares is not None:
            self._squares.complete()
            self._measured, self._squares = self._squares, None
        if self._steps:  # in the closure of a step, whose update follows
            self._update_begins(now)

    # What optimizers call.

    def step_begins(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """Note that an optimizer begins a step in the thread that trains. ``closure``: it has one to call."""
        if not self._balancer.in_round:
            return
        self._steps.append(optimizer)
        if self._stage is not _Stage.DONE:
            if closure and len(self._steps) == 1 and getattr(optimizer, "_should_synchronize", False):  # Horovod's
                raise RoundStateError(_REDUCED_BEFORE)
            return
        self._require_complete()
        now = self._balancer.now()
        if len(self._steps) == 2 and is_horovods(optimizer):
            self._meter.waited(now - self._update_began_at)
        if len(self._steps) == (2 if is_horovods(optimizer) else 1):
            self._update_begins(now)
        else:
            self._update_began_at = now

    def step_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the optimizer has stepped."""
        if all(optimizer is not each for each in self._steps):
            return
        while self._steps[-1] is not optimizer:  # it has raised
            self._steps.pop()
        if len(self._steps) == (2 if is_horovods(optimizer) else 1) and not math.isnan(self._update_began_at):
            self._meter.applied(self._balancer.now() - self._update_began_at)
            self._update_began_at = math.nan
        self._steps.pop()
        if not self._steps and self._stage is _Stage.DONE:  # else it does not use this batch's gradient
            self._require_complete()
            self._stepped = True
            self._trained.stepped(optimizer)

    def reaches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether this batch's loss has gradients for what an optimizer changes."""
        return bool(self._reached) and any(id(p) in self._reached for p in parameters_of(optimizer))

    def _require_complete(self) -> None:
        if self._balancer.between_updates:
            raise RoundStateError(f"step() {_IN_BETWEEN}")

    def _update_begins(self, now: float) -> None:
        self._update_began_at = now
        self._meter.applying(waited=True)
        if self._advanced != self._balancer.rounds:  # once for several optimizers; a state may take rounds back
            self._advanced = self._balancer.rounds
            self._balancer.advance(self._balancer.work.plan.total)
        self._rates.multiply(self._steps[-1])

    # What travels.

    def _send(self) -> None:
        squares: dict[str, float] = {}
        if self._measured is not None and self._measured.round + 1 < self._balancer.rounds:
            squares, self._measured = self._measured.read(), None
        figures = self._trained.figures(self._tables.sent)
        row = self._tables.row(broken=float(self._broken), **figures, **squares)
        self._broken = False
        self._call = self._wire.start_sum(torch.from_numpy(row), f"{self._prefix}.table"), row

    def _hear(self) -> None:
        if self._call is not None:
            (handle, row), self._call = self._call, None
            self._wire.wait(handle)
            self._tables.hear(row)
            self._require_noise()

    def _require_noise(self) -> None:
        """Raise on all ranks, where the batch goes by the noise, if it cannot be measured."""
        finished = self._balancer.finished
        if self._balancer.goodput is None or self._wire.size == 1 or finished is None:
            return
        # Another rank's mean is another one: somebody reduces gradients later.
        apart = finished.table.disagreement("mean_square", ROUNDING)
        if apart or (self._tables.sent == _PATIENCE and math.isnan(finished.noise_scale)):
            raise ValueError(_NO_NOISE)


def _checked(weight: Any) -> float:
    number = float(weight)
    if not 0.0 <= number < math.inf:
        raise ValueError(
            f"weight must be finite and at least 0, got {number}; give the number of tokens that the loss is a mean of"
        )
    return number


def _has_gradient(parameter: torch.Tensor) -> bool:
    """Return whether a gradient is there, and is not zero where looking at some of it waits for nobody."""
    gradient = parameter.grad
    if gradient is None or gradient.device.type != "cpu" or hasattr(gradient, "placements") or gradient.is_sparse:
        return gradient is not None
    return bool(gradient.detach().reshape(-1)[:_LOOKED_AT].any())


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_here = threading.local()  # at_work: the trainings of a thread that have drawn a batch, the latest one last


def _at_work() -> list[Beside]:
    trainings = (each() for each in getattr(_here, "at_work", ()))
    return [each for each in trainings if each is not None and each._balancer.in_round]


def _trained_by(optimizer: torch.optim.Optimizer) -> list[Beside]:
    """Return the trainings of this thread to which a step belongs."""
    at_work = _at_work()
    return [beside for beside in at_work if beside.reaches(optimizer)] or at_work[-1:]


@cache
def _hear_steps() -> None:
    """Hear of every step of an optimizer in this process: users need not say which one trains.

    What a compiler traced would hold for the rounds that it has seen. Keeping it off imports it, so not before here.
    """
    Beside.scale = torch.compiler.disable(Beside.scale)  # type: ignore[method-assign, no-untyped-call]
    register_optimizer_step_pre_hook(torch.compiler.disable(_step_begins))  # type: ignore[no-untyped-call]
    register_optimizer_step_post_hook(torch.compiler.disable(_step_ends))  # type: ignore[no-untyped-call]


def _step_begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for beside in _trained_by(optimizer):
        beside.step_begins(optimizer, closure=any(map(callable, (*args[1:], *kwargs.values()))))


def _step_ends(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for beside in _at_work():
        beside.step_ends(optimizer)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
