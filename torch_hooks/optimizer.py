"""The optimizer that synchronises: exact gradients from unequal batches, and the table riding along."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hvd_hetero.errors import RoundStateError
from torch_hooks.arguments import OPTIMIZER, refuse
from torch_hooks.cuda_stopwatch import DeviceTimes
from torch_hooks.gradients.allreduce import Allreduce
from torch_hooks.gradients.compression import compressor
from torch_hooks.gradients.hooks import Listener
from torch_hooks.gradients.round import RoundGradients
from torch_hooks.gradients.sparse import empty_gradient
from torch_hooks.gradients.synchroniser import Synchroniser
from torch_hooks.load_balance import LoadBalance
from torch_hooks.parameters.averaging import LocalUpdates, NeighbourAverage, average_everywhere
from torch_hooks.parameters.broadcast import (
    broadcast_parameters,
    broadcast_state,
    named_groups,
    require_alike,
    suitable,
)
from torch_hooks.parameters.made_state import MadeState, only_zeros
from torch_hooks.session import TorchSession
from torch_hooks.wrapped_optimizer import WrappedOptimizer

__all__ = ["DistributedOptimizer"]

_STOCK_SCALER = (
    "torch.amp.GradScaler would unscale gradients that are still on their way to the other ranks; use "
    "torch_hooks.GradScaler(…, optimizer=optimizer), or call optimizer.synchronize() first and scaler.step(optimizer) "
    "under optimizer.skip_synchronize() if it returns True"
)
_OUT_OF_TURN = (
    "step() came before that of an optimizer whose LoadBalance was made earlier, and a rank without data would take "
    "part in the other order; the optimizer that steps first gets the loader's balance, and the others balance.also(), "
    "made in the order of their steps"
)


class DistributedOptimizer(WrappedOptimizer):
    """Wraps an optimizer so that a round over all ranks is one step of the single process with the global batch.

    Inside a round of several micro-batches, ``zero_grad()`` and ``step()`` do nothing until the last one; so the loop
    of a user need not know how many there are. How gradients travel is the synchroniser's business (``Allreduce``,
    ``NeighbourAverage``, ``LocalUpdates``).

    What belongs to an update and not to a batch (clipping, unscaling, a schedule per step) has its place in
    ``register_step_pre_hook`` and ``register_step_post_hook``: they run once per round on every rank, while the loop's
    body runs once per micro-batch, and not at all on a rank without data. Ranks that differ in their learning rates are
    found out in the next round; in a parameter (on CPUs), within as many rounds as there are parameters.

    A round begins without gradients: what is left of an earlier one is cleared then, in whatever order the loop calls
    ``zero_grad()``, ``backward()`` and ``step()``, and on a rank whose loop does not run. Inside a round of several
    micro-batches clear nothing by ``model.zero_grad()``; it is found out.

    Gradients below 1 MiB travel together: after ``step()`` they lie next to each other, and ``p.grad`` is another
    tensor than the backward pass has left. One that you keep stays as it is: the next round gives ``p.grad`` a new
    tensor, also after ``zero_grad(set_to_none=False)``. It holds on to the memory of all that travelled beside it, also
    in ``torch.save``: keep ``p.grad.clone()``.

    Parameters and the optimizer's state are broadcast from rank 0 at construction. Where rank 0 alone loads a
    checkpoint later, ``hvd.broadcast_parameters`` and ``hvd.broadcast_optimizer_state`` do what they do in Horovod.
    Buffers of a model (the running statistics of batch norm) are not parameters, and stay the user's:
    ``hvd.broadcast_parameters(model.state_dict(), 0)``.

    Composition, not a class made at run time: ``optimizer`` keeps its class, and hyper-parameters, state, hooks and
    schedulers work on the one that was given, since this object shares its ``param_groups``.

    Parameters
    ----------
    optimizer
        Any ``torch.optim.Optimizer``, already made from the model's parameters.
    balance
        The ``LoadBalance`` of this training.
    named_parameters
        ``model.named_parameters()``. Names identify gradients across ranks. None numbers them by their place in
        the optimizer.
    compression
        ``hvd.Compression.fp16`` sends gradients in 16 bits; weights are applied before, counts are never compressed.
    sparse_as_dense
        Make sparse gradients dense before they are sent, which is faster where most rows are touched, and lets
        optimizers be used that take no sparse ones. Otherwise only the rows that were touched are sent.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        balance: LoadBalance,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        *,
        compression: Any = None,
        sparse_as_dense: bool = False,
        **others: Any,
    ) -> None:
        refuse(others, OPTIMIZER, "DistributedOptimizer")
        suitable(optimizer)
        if not isinstance(balance, LoadBalance):
            raise TypeError(
                f"balance must be the LoadBalance of this training, got {type(balance).__name__}; write "
                "DistributedOptimizer(optimizer, balance, named_parameters=model.named_parameters())"
            )
        session = balance.session
        if session.optimizer is not None:
            raise ValueError(
                "balance already serves another optimizer; give this one balance.also(), which takes part in the same "
                "rounds (in the order of the steps), or close() that one between rounds"
            )
        super().__init__(optimizer)
        self._balancer = session.balancer
        self._wire = session.wire
        self._prefix = session.prefix
        self._names = named_groups(optimizer, named_parameters)
        self._synchronised = False
        self._declined = False
        self._skip = False
        self._closed = False
        self._scaler: Any = None
        self._made: MadeState | None = None
        packed = compressor(compression)
        self._sync = self._synchroniser(session, packed, sparse_as_dense)
        self._times = DeviceTimes(session.policy, session.meter)
        self._times.include(self._names)
        serves = self._serves = weakref.ref(session)  # which holds this one
        self._round = RoundGradients(self._balancer, self._names, self._sync, lambda: _at_work(serves()))
        self._listener = Listener(self._round, RoundGradients.arrived, self._sync.note_of)
        self._listener.listen(self._names)
        weakref.finalize(self, self._listener.close).atexit = False
        name = None if packed is None else getattr(packed, "__name__", type(packed).__name__)
        options = f"compression={name}, sparse_as_dense={bool(sparse_as_dense)}"
        require_alike(self._wire, options, f"{self._prefix}.wire")
        broadcast_parameters(self._wire, self._names, self._prefix)
        broadcast_state(self._wire, optimizer, self._prefix)
        session.optimizer = self
        self._earlier = session.earlier
        self._body = session.body

    def _synchroniser(self, session: TorchSession, compression: Any, sparse_as_dense: bool) -> Synchroniser:
        about = (self._balancer, self._inner, self._names, self._prefix, self._wire)
        if session.mixing is None and not session.policy.updates_locally:
            return Allreduce(*about, compression=compression, sparse_as_dense=sparse_as_dense)
        if compression is not None or sparse_as_dense:
            raise ValueError(
                "compression and sparse_as_dense are for gradients that are summed over the ranks, and this training "
                "sends parameters instead; leave them out, or use sync='allreduce' with a policy without local updates"
            )
        return LocalUpdates(*about) if session.mixing is None else NeighbourAverage(*about, session.mixing)

    # What a round asks of it.

    def begin_micro_batch(self) -> None:
        """A micro-batch begins."""
        self._synchronised = False  # a gradient scaler may have left the last round's gradients unused
        self._declined = False
        if self._made is not None:
            self._made.forget_unless_received()
            self._made = None
        self._round.begin_micro_batch()

    def guard_micro_batch(self) -> None:
        """The micro-batch that has begun may run out of memory: be able to undo it."""
        self._round.guard_micro_batch()

    def undo_micro_batch(self) -> bool:
        """Whether all is as when the micro-batch began, but for gradients that have left and are complete."""
        return self._round.undo_micro_batch()

    def abandon_round(self) -> None:
        """Forget what an unfinished round has gathered."""
        if self._balancer.in_round:
            self._round.abandon()
            self._inner.zero_grad()

    def idle_round(self) -> None:
        """End a round without data: add nothing to what it has gathered, if anything, then update as everybody does."""
        if self._scaler is None:
            self.step()
        else:
            self._scaler.step_without_data()

    def synchronize(self) -> bool:
        """Wait for the summed gradients. Horovod's pattern for clipping works: synchronise, clip, step under
        ``skip_synchronize()``; inside a round of several micro-batches nothing happens, and the answer is False.
        """
        if self._synchronised or self._declined:
            return False
        if any(earlier.computing for earlier in self._earlier):
            raise RoundStateError(_OUT_OF_TURN)
        if self._sync.updates_locally:
            self._synchronised = self._balancer.in_round
            return self._synchronised  # every gradient is final, and this rank's own
        # What is done again in parts is done to the end: gradients of the whole micro-batch have left already.
        if not (self._balancer.closing or (not self._round.done_in_parts and self._balancer.stop_early())):
            # Until the next micro-batch: step() must not find out otherwise, without the clipping.
            self._declined = True
            return False
        self._round.finish()
        if self._sync.rearranged:
            self._sync.rearranged = False
            self._listener.listen(self._names)  # to those that have been thawed
        self._synchronised = True
        if self._body.watching:
            self._body.note()
        return True

    @property
    def synchronised(self) -> bool:
        """Whether the gradients are the sums of all ranks, and the step has not followed yet."""
        return self._synchronised

    @property
    def common(self) -> bool:
        """Whether all ranks hold the same parameters after each round."""
        return isinstance(self._sync, Allreduce)

    @property
    def scaled(self) -> bool:
        """Whether a gradient scaler changes its gradients, on every rank."""
        return self._scaler is not None

    @property
    def between_updates(self) -> bool:
        """Whether gradients are still being gathered for an update."""
        return self._balancer.between_updates

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step()`` within uses the gradients as they are: ``synchronize()`` has been called."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    # What the training loop asks of it.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronise and update, at the end of a round; otherwise only note that the micro-batch is done.

        A ``closure`` computes the gradient of this micro-batch, and is called exactly once. Returns what it returns.
        """
        balancer = self._balancer
        if self._closed:
            raise RoundStateError("step() of an optimizer that was closed; call step() of the one that took its place")
        if not (self._synchronised or balancer.in_round):
            if not any(self._inner.state.values()) and only_zeros(self._names):
                self._made = MadeState(self._inner, self._names)
                return None
            raise RoundStateError(
                "step() came without a batch: iterate over a BalancedLoader, or announce your own batch with "
                "balance.batch(samples) before its forward pass"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._body.watching:
            self._body.step_begins()
        self._step()
        if self._body.watching:
            self._body.step_ends()
        return loss

    def _step(self) -> None:
        balancer = self._balancer
        if self._skip and not self._synchronised:
            if balancer.between_updates:
                balancer.pause()
                return
            raise RoundStateError("step() under skip_synchronize() needs a call of synchronize() before it")
        if self._sync.updates_locally:
            self._step_locally()
            return
        if not (self._synchronised or self.synchronize()):
            self._round.applied()
            balancer.pause()
            return
        self._synchronised = False
        start = time.perf_counter()
        balancer.applying()
        self._inner.step()
        balancer.applied(time.perf_counter() - start)

    def _step_locally(self) -> None:
        self._synchronised = False
        self._round.applied()
        if self._balancer.work.samples:
            for parameter in self._names:  # state must exist alike on all ranks, whatever their losses have reached
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = empty_gradient(parameter, self._inner)
            self._inner.step()
        if self._balancer.closing:
            self._sync.finish()
        else:
            self._balancer.pause()

    def use_scaler(self, scaler: Any) -> None:
        """Gradients are scaled; a rank without data must know, too (``GradScaler``'s way of saying so)."""
        if not isinstance(self._sync, Allreduce):
            raise ValueError(
                "gradients stay on their rank here, so one rank would skip a step for an infinity that the others do "
                "not see; use torch.autocast(dtype=torch.bfloat16), which needs no scaler, or sync='allreduce' with a "
                "policy without local updates"
            )
        self._scaler = scaler

    def note_scale(self, logarithm: float) -> None:
        """The scale of the gradients to come, which must be the same on every rank."""
        self._sync.scale = logarithm

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # PyTorch's scaler looks here first. It would hand its factor to a fused optimizer by attributes of this object,
        # which never reach it; and it unscales by an operation that leaves a tensor's version as it was, so that no
        # later look would find it out.
        if not self._synchronised:
            raise RoundStateError(_STOCK_SCALER)
        return False

    def average_parameters(self) -> None:
        """Give all ranks the mean of their parameters; on every rank, between rounds.

        Under D-PSGD and MATCHA ranks hold different models, and their mean is the result. Elsewhere it changes nothing.
        """
        if self._balancer.in_round:
            raise RoundStateError("average_parameters() in the middle of a round; call it between rounds")
        average_everywhere(self._wire, self._names, self._prefix)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless a round is under way that still adds to them."""
        if self._sync.under_way and not self._round.done_in_parts:
            raise RoundStateError(
                "zero_grad() came after backward() and before step(): it would race with what is under way. "
                "Call it before backward(). If another optimizer's loss has brought the gradient, let this one step "
                "first, or freeze its parameters meanwhile by requires_grad_(False)"
            )
        if self._round.accumulating:
            return
        self._inner.zero_grad(set_to_none=set_to_none)

    def close(self) -> None:
        """Let go of the parameters and, between rounds, of the ``LoadBalance``: another optimizer can go on with both.

        An unfinished round is forgotten, unless gradients of it are on their way; then the ``LoadBalance`` is of no use
        any more. Hooks that were registered here are taken off the optimizer inside.
        """
        self._closed = True
        self._remove_hooks()
        self._listener.close()
        session = self._serves()
        if session is not None and session.optimizer is self and not self._sync.gradients_left:
            self.abandon_round()
            self._sync.release()
            session.optimizer = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the wrapped optimizer's state; between rounds only, on every rank."""
        if self._balancer.in_round:
            raise RoundStateError("load_state_dict() in the middle of a round; call it between rounds")
        self._inner.load_state_dict(dict(state_dict))
        self._made = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, the same on every rank, between rounds. They are named by their place."""
        if self._balancer.in_round:
            raise RoundStateError("add_param_group() in the middle of a round; call it between rounds")
        self._inner.add_param_group(param_group)
        group = len(self._inner.param_groups) - 1
        added = {p: f"group{group}.{i}" for i, p in enumerate(self._inner.param_groups[group]["params"])}
        self._names.update(added)
        self._sync.extend(added)
        self._times.include(added)
        self._listener.listen(added)
        broadcast_parameters(self._wire, added, f"{self._prefix}.group{group}")


def _at_work(session: TorchSession | None) -> bool:
    return session is not None and session.at_work
