"""The updates of one optimizer, one in a round: gradients are gathered, averaged over the ranks, and applied."""

from __future__ import annotations

import itertools
import operator
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from hvd_hetero.errors import RoundStateError
from torch_hooks.cuda_stopwatch import DeviceTimes
from torch_hooks.gradients.compression import compressor
from torch_hooks.gradients.gathered import Gathered
from torch_hooks.gradients.sparse import empty_gradient
from torch_hooks.parameters.averaging import average_everywhere
from torch_hooks.parameters.broadcast import broadcast_parameters, broadcast_state, require_alike
from torch_hooks.parameters.made_state import MadeState, only_zeros
from torch_hooks.session import TorchSession
from torch_hooks.synchronisers import synchroniser_of

__all__ = ["Scaler", "Updates"]

_OUT_OF_TURN = (
    "step() came before that of an optimizer whose LoadBalance was made earlier, and a rank without data would take "
    "part in the other order; the optimizer that steps first gets the loader's balance, and the others balance.also(), "
    "made in the order of their steps"
)


class Scaler(Protocol):
    """What is asked of a gradient scaler."""

    def step_without_data(self) -> None:
        """Do what the loop's body does on other ranks."""


class Steps(Protocol):
    """What is asked of the optimizer that users hold."""

    def step(self) -> Any:
        """Do what the loop's body does on other ranks."""


class Updates:
    """What a session and a gradient scaler ask of a ``DistributedOptimizer``, whose state this is.

    ``optimizer`` is the one inside, ``outer`` the one that users hold, on which ``hooks`` were registered.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        session: TorchSession,
        names: dict[torch.Tensor, str],
        hooks: list[RemovableHandle],
        outer: Steps,
        *,
        compression: Any,
        sparse_as_dense: bool,
    ) -> None:
        packed = compressor(compression, session.wire)
        self.scaler: Scaler | None = None
        self._inner = optimizer
        self._names = names
        self._hooks = hooks
        self._outer = weakref.ref(outer)
        self._balancer = session.balancer
        self._wire = session.wire
        self._prefix = session.prefix
        self._earlier = session.earlier
        self._synchronised = False
        self._declined = False
        self._skip = False
        self._closed = False
        self._made: MadeState | None = None
        self._synchroniser = synchroniser_of(
            session, optimizer, names, compression=packed, sparse_as_dense=sparse_as_dense
        )
        self._times = DeviceTimes(session.policy.name, session.meter, needed=session.goes_by_time)
        self._times.include(names)
        serves = self._serves = weakref.ref(session)  # which holds this
        self._gathered = Gathered(
            self._balancer, names, lambda: _at_work(serves()), summed=self._synchroniser.keeps_ranks_alike
        )
        self._gathered.listen(names)
        weakref.finalize(self, self._gathered.close).atexit = False
        name = None if packed is None else getattr(packed, "__name__", type(packed).__name__)
        options = f"compression={name}, sparse_as_dense={bool(sparse_as_dense)}"
        require_alike(self._wire, options, f"{self._prefix}.wire")
        broadcast_parameters(self._wire, names, self._prefix)
        broadcast_state(self._wire, optimizer, self._prefix)
        session.optimizer = self

    @property
    def synchronised(self) -> bool:
        """Whether the gradients are the sums of all ranks, and the step has not followed yet."""
        return self._synchronised

    @property
    def between_updates(self) -> bool:
        """Whether gradients are still being gathered for an update."""
        return self._balancer.between_updates

    # What a round asks.

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch."""
        self._synchronised = False  # a gradient scaler may have left the last round's gradients unused
        self._declined = False
        if self._made is not None:
            self._made.forget_unless_received()
            self._made = None
        self._gathered.begin(adds=self._adds)

    def guard_micro_batch(self) -> None:
        """Be able to undo the micro-batch that has begun: it may run out of memory."""
        self._gathered.guard()

    def undo_micro_batch(self) -> bool:
        """Undo the micro-batch; return whether that was possible."""
        return self._gathered.undo()

    def abandon_round(self) -> None:
        """Forget what an unfinished round has gathered."""
        if self._balancer.in_round:
            self._gathered.done()
            self._balancer.abandon()
            self._inner.zero_grad()

    def idle_round(self) -> None:
        """End a round without data: add nothing to what it has gathered, if anything, then update as everybody does."""
        if self.scaler is not None:
            self.scaler.step_without_data()
        elif (outer := self._outer()) is not None:
            outer.step()  # which a user's subclass, or a schedule, may have given more to do

    def close(self) -> None:
        """Let go of the parameters and, between rounds, of the session."""
        self._closed = True
        while self._hooks:
            self._hooks.pop().remove()
        self._gathered.close()
        session = self._serves()
        if session is not None and session.optimizer is self and not self._balancer.synchronising:
            self.abandon_round()
            session.optimizer = None

    # What the training loop asks.

    def synchronize(self) -> bool:
        """Wait for the averaged gradients, if the round is complete; return whether it is."""
        if self._synchronised or self._declined:
            return False
        if any(earlier.computing for earlier in self._earlier):
            raise RoundStateError(_OUT_OF_TURN)
        if self._synchroniser.updates_locally:
            self._synchronised = self._balancer.in_round
            return self._synchronised  # every gradient is final, and this rank's own
        if not (self._balancer.closing or self._balancer.stop_early()):
            # Until the next micro-batch: step() must not find out otherwise, without the clipping.
            self._declined = True
            return False
        self._gathered.complete()
        self._synchroniser.finish()
        if self._synchroniser.thawed:
            self._synchroniser.thawed = False
            self._gathered.listen(self._names)
        self._synchronised = True
        return True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step()`` within uses the gradients as they are."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronise and update, at the end of a round; otherwise only note that the micro-batch is done."""
        if self._closed:
            raise RoundStateError("step() of an optimizer that was closed; call step() of the one that took its place")
        if not (self._synchronised or self._balancer.in_round):
            if not any(self._inner.state.values()) and only_zeros(self._names):
                self._made = MadeState(self._inner, self._names)
                return None
            raise RoundStateError(
                "step() came without a batch: iterate over a BalancedLoader, or announce your own batch with "
                "balance.batch(samples) before its forward pass"
            )
        self._require_known()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients, unless a round is under way that still adds to them."""
        if self._adds:
            self._gathered.keep()
        else:
            self._inner.zero_grad(set_to_none=set_to_none)

    @property
    def _adds(self) -> bool:
        """True if gradients of earlier micro-batches wait to be added to."""
        return self._balancer.accumulating and not self._synchroniser.updates_locally

    # What is asked between two rounds.

    def require_between_rounds(self, what: str) -> None:
        """Raise in the middle of a round."""
        if self._balancer.in_round:
            raise RoundStateError(f"{what} in the middle of a round; call it between rounds")

    def state_was_loaded(self) -> None:
        """Keep the state that the inner optimizer has now: it was loaded."""
        self._made = None

    def extend(self, added: dict[torch.Tensor, str], group: int) -> None:
        """Train the parameters of one more group, too."""
        self._names.update(added)
        self._synchroniser.extend(added)
        self._times.include(added)
        self._gathered.listen(added)
        broadcast_parameters(self._wire, added, f"{self._prefix}.group{group}")

    def average_parameters(self) -> None:
        """Give all ranks the mean of their parameters."""
        average_everywhere(self._wire, self._names, self._prefix)

    def use_scaler(self, scaler: Scaler) -> None:
        """Gradients are scaled, which a rank without data must know, too."""
        if not self._synchroniser.keeps_ranks_alike:
            raise ValueError(
                "gradients stay on their rank here, so one rank would skip a step for an infinity that the others do "
                "not see; use torch.autocast(dtype=torch.bfloat16), which needs no scaler, or sync='allreduce' with a "
                "policy without local updates"
            )
        self.scaler = scaler

    def note_scale(self, logarithm: float) -> None:
        """Note the scale of the gradients to come, which must be the same on every rank."""
        self._synchroniser.scale = logarithm

    def _require_known(self) -> None:
        """Raise if the optimizer would update parameters whose gradients are not summed."""
        trained = [*itertools.chain.from_iterable(group["params"] for group in self._inner.param_groups)]
        if len(trained) == len(self._names) and all(map(operator.is_, trained, self._names)):
            return
        for parameter in trained:
            if parameter not in self._names:
                raise RoundStateError(
                    f"the optimizer inside holds a parameter of shape {tuple(parameter.shape)} that no rank sums. "
                    "Add parameters by add_param_group() of the DistributedOptimizer, between rounds; where they were "
                    "replaced, close() it and wrap the optimizer again"
                )

    def _step(self) -> None:
        balancer = self._balancer
        if self._skip and not self._synchronised:
            if balancer.between_updates:
                balancer.pause()
                return
            raise RoundStateError("step() under skip_synchronize() needs a call of synchronize() before it")
        if self._synchroniser.updates_locally:
            self._step_locally()
            return
        if not (self._synchronised or self.synchronize()):
            self._gathered.done()
            balancer.pause()
            return
        self._synchronised = False
        balancer.require_finite()
        start = time.perf_counter()
        balancer.applying()
        self._inner.step()
        balancer.applied(time.perf_counter() - start)

    def _step_locally(self) -> None:
        self._synchronised = False
        self._gathered.done()
        if self._balancer.work.samples:
            for parameter in self._names:  # state must exist alike on all ranks, whatever their losses have reached
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = empty_gradient(parameter, self._inner)
            self._inner.step()
        if self._balancer.closing:
            self._synchroniser.finish()
        else:
            self._balancer.pause()


def _at_work(session: TorchSession | None) -> bool:
    return session is not None and session.at_work
