"""An optimizer's side of a round: what a session and a gradient scaler ask of it between two of the loop's calls."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from torch_hooks.cuda_stopwatch import DeviceTimes
from torch_hooks.gradients.compression import compressor
from torch_hooks.gradients.gathered import Gathered
from torch_hooks.parameters.broadcast import broadcast_parameters, broadcast_state, require_alike
from torch_hooks.parameters.made_state import MadeState
from torch_hooks.session import TorchSession
from torch_hooks.synchronisers import synchroniser_of
from torch_hooks.wrapped_optimizer import WrappedOptimizer


class Scaler(Protocol):
    """What is asked of a gradient scaler."""

    def step_without_data(self) -> None:
        """Do what the loop's body does on other ranks."""


class Updates(WrappedOptimizer):
    """The updates of one optimizer, one in a round: gradients are gathered, averaged over the ranks, and applied."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        session: TorchSession,
        names: dict[torch.Tensor, str],
        *,
        compression: Any,
        sparse_as_dense: bool,
    ) -> None:
        packed = compressor(compression, session.wire)
        super().__init__(optimizer)
        self._names = names
        self._scaler: Scaler | None = None
        self._balancer = session.balancer
        self._wire = session.wire
        self._prefix = session.prefix
        self._earlier = session.earlier
        self._synchronised = False
        """True: the gradients are the sums of all ranks, and the step has not followed yet."""
        self._declined = False
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

    @property
    def _between_updates(self) -> bool:
        """Whether gradients are still being gathered for an update."""
        return self._balancer.between_updates

    def _begin_micro_batch(self) -> None:
        """Begin a micro-batch."""
        self._synchronised = False  # a gradient scaler may have left the last round's gradients unused
        self._declined = False
        if self._made is not None:
            self._made.forget_unless_received()
            self._made = None
        self._gathered.begin(adds=self._adds)

    def _guard_micro_batch(self) -> None:
        """Be able to undo the micro-batch that has begun: it may run out of memory."""
        self._gathered.guard()

    def _undo_micro_batch(self) -> bool:
        """Undo the micro-batch; return whether that was possible."""
        return self._gathered.undo()

    def _abandon_round(self) -> None:
        """Forget what an unfinished round has gathered."""
        if self._balancer.in_round:
            self._gathered.done()
            self._balancer.abandon()
            self._inner.zero_grad()

    def _idle_round(self) -> None:
        """End a round without data: add nothing to what it has gathered, if anything, then update as everybody does."""
        if self._scaler is not None:
            self._scaler.step_without_data()
        else:
            self.step()  # which a user's subclass, or a schedule, may have given more to do

    def _use_scaler(self, scaler: Scaler) -> None:
        """Gradients are scaled, which a rank without data must know, too."""
        if not self._synchroniser.keeps_ranks_alike:
            raise ValueError(
                "gradients stay on their rank here, so one rank would skip a step for an infinity that the others do "
                "not see; use torch.autocast(dtype=torch.bfloat16), which needs no scaler, or sync='allreduce' with a "
                "policy without local updates"
            )
        self._scaler = scaler

    def _note_scale(self, logarithm: float) -> None:
        """Note the scale of the gradients to come, which must be the same on every rank."""
        self._synchroniser.scale = logarithm

    @property
    def _adds(self) -> bool:
        """True if gradients of earlier micro-batches wait to be added to."""
        return self._balancer.accumulating and not self._synchroniser.updates_locally


def _at_work(session: TorchSession | None) -> bool:
    return session is not None and session.at_work
