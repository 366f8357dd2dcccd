"""The optimizer that synchronises: exact gradients from unequal batches, and the table riding along."""

from __future__ import annotations

import itertools
import operator
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hvd_hetero.errors import RoundStateError
from torch_hooks.cuda_stopwatch import DeviceTimes
from torch_hooks.gradients.allreduce import Allreduce
from torch_hooks.gradients.compression import compressor
from torch_hooks.gradients.gathered import Gathered
from torch_hooks.gradients.sparse import empty_gradient
from torch_hooks.gradients.synchroniser import SynchronisedOptimizer, Synchroniser
from torch_hooks.load_balance import LoadBalance
from torch_hooks.parameters.averaging import LocalUpdates, NeighbourAverage, average_everywhere
from torch_hooks.parameters.broadcast import (
    broadcast_parameters,
    broadcast_state,
    named_groups,
    refuse_synchronised,
    suitable,
)
from torch_hooks.parameters.fresh_state import FreshState, all_gradients_are_zero
from torch_hooks.rates import Rates
from torch_hooks.session import TorchSession
from torch_hooks.wrapped_optimizer import WrappedOptimizer

_STOCK_SCALER = (
    "torch.amp.GradScaler would look for infinities in gradients of this rank alone; use "
    "torch_hooks.GradScaler(…, optimizer=optimizer), or call optimizer.synchronize() first and scaler.step(optimizer) "
    "under optimizer.skip_synchronize() if it returns True"
)


_OUT_OF_TURN = (
    "step() was called before that of an optimizer whose LoadBalance was made earlier, and ranks without data "
    "keep to that order. Give the loader's balance to the optimizer that steps first, and balance.also() to the "
    "others, in the order of their steps"
)


class Scaler(Protocol):
    """What is asked of a gradient scaler."""

    def step_without_data(self) -> None:
        """Take part in the step of the other ranks, without data of this rank's own."""


class DistributedOptimizer(WrappedOptimizer):
    """Wraps an optimizer so that a round over all ranks is one step of the single process with the global batch.

    Inside a round of several micro-batches, ``zero_grad()`` and ``step()`` do nothing until the last one; so the loop
    of a user need not know how many there are. How gradients travel is the synchroniser's business (``Allreduce``,
    ``NeighbourAverage``, ``LocalUpdates``).

    What belongs to an update and not to a batch (clipping, unscaling, a schedule per step) has its place in
    ``register_step_pre_hook`` and ``register_step_post_hook``: they run once per round on every rank. The loop's body
    runs once per micro-batch, and a rank without data skips it. Ranks that differ in their learning rates are
    found out in the next round; in a parameter (on CPUs), within as many rounds as there are parameters.

    A round begins without gradients: what is left of an earlier one is cleared then, in whatever order the loop calls
    ``zero_grad()``, ``backward()`` and ``step()``, and on a rank whose loop does not run. Inside a round of several
    micro-batches clear nothing by ``model.zero_grad()``; it is found out.

    Gradients are summed at the end of the round, when all are there: a batch may have several backward passes. The
    transfer does not hide behind them. Where the network is slow and a round is one micro-batch, ``balance.scale``
    beside DDP or Horovod's optimizer hides it.

    Parameters and the optimizer's state are broadcast from rank 0 at construction. Where rank 0 alone loads a
    checkpoint later, ``hvd.broadcast_parameters`` and ``hvd.broadcast_optimizer_state`` do what they do in Horovod.
    Buffers of a model (the running statistics of batch norm) are not parameters, and stay the user's:
    ``hvd.broadcast_parameters(model.state_dict(), 0)``.

    Composition, not a class made at run time: ``optimizer`` keeps its class, and hyper-parameters, state, hooks and
    schedulers work on the one that was given, since this object shares its ``param_groups``. To add parameters, call
    ``add_param_group`` of this object; what is added to the other one alone is found out at the next ``step()``.

    Parameters
    ----------
    optimizer
        Any ``torch.optim.Optimizer``, already made from the model's parameters.
    balance
        The ``LoadBalance`` of this training.
    named_parameters
        ``model.named_parameters()``. Names identify gradients across ranks. None numbers them by their position
        in the optimizer.
    compression
        ``torch.float16`` or ``hvd.Compression.fp16`` sends gradients in 16 bits; weights are applied before, counts are
        never compressed.
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
    ) -> None:
        suitable(optimizer)
        refuse_synchronised(optimizer)
        if not isinstance(balance, LoadBalance):
            raise TypeError(
                f"balance must be the LoadBalance of this training, got {type(balance).__name__}; write "
                "DistributedOptimizer(optimizer, balance, named_parameters=model.named_parameters())"
            )
        session = balance._session
        if session.beside is not None:
            raise ValueError(
                "balance is used beside another reducer already (balance.scale); make the DistributedOptimizer "
                "before the first batch, or keep the other reducer"
            )
        if session.optimizer is not None:
            raise ValueError(
                "balance is used by another optimizer already; give this one balance.also(), or close() the other "
                "one between rounds"
            )
        packed = compressor(compression, session.wire)
        super().__init__(optimizer)
        names = named_groups(optimizer, named_parameters)
        self._names = names
        self._scaler: Scaler | None = None
        self._balancer = session.balancer
        self._wire = session.wire
        self._prefix = session.prefix
        self._synchronised = False
        """True: the gradients are the sums of all ranks, and the step has not followed yet."""
        self._declined = False
        self._made: FreshState | None = None
        self._synchroniser = _synchroniser_of(
            session, optimizer, names, compression=packed, sparse_as_dense=sparse_as_dense
        )
        self._times = DeviceTimes(session.policy.name, session.meter, needed=session.depends_on_time)
        self._times.include(names)
        self._serves = weakref.ref(session)  # which holds this
        self._gathered = Gathered(self._balancer, names, summed=self._synchroniser.keeps_ranks_alike)
        self._gathered.listen(names)
        weakref.finalize(self, self._gathered.close).atexit = False
        name = None if packed is None else getattr(packed, "__name__", type(packed).__name__)
        options = f"compression={name}, sparse_as_dense={bool(sparse_as_dense)}"
        broadcast_parameters(self._wire, names, self._prefix, options)
        broadcast_state(self._wire, optimizer, self._prefix)

        self._skip = False
        self._rates = Rates(session.balancer)
        self._closed = False
        session.optimizer = self

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronise and update, at the end of a round; otherwise only note that the micro-batch is done.

        A ``closure`` computes the gradient of this micro-batch, and is called exactly once. Returns what it returns.
        """
        if self._closed:
            raise RoundStateError("step() was called on a closed optimizer; call step() of the one that replaced it")
        if not (self._synchronised or self._balancer.in_round):
            if not any(self._inner.state.values()) and all_gradients_are_zero(self._names):
                self._made = FreshState(self._inner, self._names)
                return None
            raise RoundStateError(
                "step() was called without a batch; iterate over a BalancedLoader, or announce your own batch "
                "with balance.batch(samples) before its forward pass"
            )
        self._require_known()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless a round is under way that still adds to them."""
        if self._adds:
            self._gathered.keep()
        else:
            self._inner.zero_grad(set_to_none=set_to_none)

    def synchronize(self) -> bool:
        """Wait for the summed gradients.

        Horovod's pattern for clipping works: synchronise, clip, step under ``skip_synchronize()``. Inside a round of
        several micro-batches nothing happens, and the result is False.
        """
        if self._synchronised or self._declined:
            return False
        session = self._serves()
        if session is not None and any(earlier.computing for earlier in session.stepping_before):
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
        self._gathered.awaits_step = True
        if self._synchroniser.thawed:
            self._synchroniser.thawed = False
            self._gathered.listen(self._names)
        self._synchronised = True
        return True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step()`` within uses the gradients as they are: ``synchronize()`` has been called."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def average_parameters(self) -> None:
        """Give all ranks the mean of their parameters; on every rank, between rounds.

        Under D-PSGD and MATCHA ranks hold different models, and their mean is the result. Elsewhere it changes nothing.
        """
        self._require_between_rounds("average_parameters()")
        average_everywhere(self._wire, self._names, self._prefix)

    def close(self) -> None:
        """Let go of the parameters and, between rounds, of the ``LoadBalance``: another optimizer can go on with both.

        An unfinished round is forgotten, unless its sum has failed; then the ``LoadBalance`` is of no use any more.
        Hooks that were registered here are taken off the optimizer inside.
        """
        self._closed = True
        while self._hooks:
            self._hooks.pop().remove()
        self._gathered.close()
        session = self._serves()
        if session is not None and session.optimizer is self and not self._balancer.synchronising:
            self._discard_round()
            session.optimizer = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the wrapped optimizer's state; between rounds only, on every rank."""
        self._require_between_rounds("load_state_dict()")
        self._inner.load_state_dict(dict(state_dict))
        self._made = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, the same on every rank, between rounds. They are named by their position."""
        self._require_between_rounds("add_param_group()")
        self._inner.add_param_group(param_group)
        group = len(self._inner.param_groups) - 1
        added: dict[torch.Tensor, str] = {
            p: f"group{group}.{i}" for i, p in enumerate(self._inner.param_groups[group]["params"])
        }
        self._names.update(added)
        self._synchroniser.extend(added)
        self._times.include(added)
        self._gathered.listen(added)
        broadcast_parameters(self._wire, added, f"{self._prefix}.group{group}")

    def _require_between_rounds(self, what: str) -> None:
        """Raise in the middle of a round."""
        if self._balancer.in_round:
            raise RoundStateError(f"{what} was called in the middle of a round; call it between rounds")

    def _require_known(self) -> None:
        """Raise if the optimizer would update parameters whose gradients are not summed."""
        # Taking them up here was rejected: a rank without data skips the loop's body and would not know of them, so the
        # others would wait in the broadcast. Compared by identity and in C, since it is done for each step.
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

    def _update(self) -> None:
        balancer = self._balancer
        if self._skip and not self._synchronised:
            if not balancer.between_updates:
                raise RoundStateError("step() under skip_synchronize() needs a call of synchronize() before it")
            # Else a zero_grad() that follows would seem to clear this micro-batch.
            self._gathered.done()
            balancer.pause()
            return
        if self._synchroniser.updates_locally:
            self._update_locally()
            return
        if not (self._synchronised or self.synchronize()):
            self._gathered.done()
            balancer.pause()
            return
        self._synchronised = self._gathered.awaits_step = False
        balancer.require_finite()
        start = time.perf_counter()
        balancer.meter.applying()
        self._rates.multiply(self._inner, self)
        try:
            self._inner.step()
        finally:
            self._rates.restore()
        balancer.meter.applied(time.perf_counter() - start)

    def _update_locally(self) -> None:
        self._synchronised = False
        self._gathered.done()
        if self._balancer.work.samples:
            # The optimizer's state must exist alike on all ranks, whatever their losses have reached.
            for parameter in self._names:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = empty_gradient(parameter, self._inner)
            self._inner.step()
        if self._balancer.closing:
            self._synchroniser.finish()
        else:
            self._balancer.pause()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # PyTorch's scaler looks here first. It would hand its factor to a fused optimizer by attributes of this object,
        # which never reach it; and it unscales by an operation that leaves a tensor's version as it was, so that no
        # later look would find it out.
        if not self._synchronised:
            raise RoundStateError(_STOCK_SCALER)
        self._gathered.awaits_step = False  # the scaler may find an infinity, and leave the update out
        return False

    def _begin_micro_batch(self) -> None:
        """Begin a micro-batch."""
        # A gradient scaler may have left the last round's gradients unused.
        self._synchronised = False
        self._declined = False
        if self._made is not None:
            self._made.forget_unless_received()
            self._made = None
        self._gathered.begin(adds=self._adds)

    def _discard_round(self) -> None:
        """Forget what an unfinished round has gathered."""
        if self._balancer.in_round:
            self._gathered.done()
            self._balancer.discard_round()
            self._inner.zero_grad()

    def _idle_round(self) -> None:
        """End a round without data: add nothing to what it has gathered, if anything, then update as everybody does."""
        if self._scaler is not None:
            self._scaler.step_without_data()
        else:
            self.step()  # which a user's subclass, or a schedule, may have given more to do

    def _use_scaler(self, scaler: Scaler) -> None:
        """Keep the gradient scaler, through which this rank steps when it has no data."""
        if not self._synchroniser.keeps_ranks_alike:
            raise ValueError(
                "a GradScaler does not work where gradients stay on their rank: one rank would skip a step for an "
                "infinity that the others do not see. Use torch.autocast(dtype=torch.bfloat16), which needs no "
                "scaler, or sync='allreduce' with a policy without local updates"
            )
        self._scaler = scaler

    @property
    def _adds(self) -> bool:
        """True if gradients of earlier micro-batches wait to be added to."""
        return self._balancer.accumulating and not self._synchroniser.updates_locally


def _synchroniser_of(
    session: TorchSession,
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    *,
    compression: Any,
    sparse_as_dense: bool,
) -> Synchroniser:
    """Return the synchroniser that averages gradients or parameters of this optimizer over the ranks."""
    trained = SynchronisedOptimizer(session.balancer, optimizer, names, session.prefix, session.wire)
    if session.mixing is None and not session.policy.updates_locally:
        return Allreduce(trained, compression=compression, sparse_as_dense=sparse_as_dense)
    if compression is not None or sparse_as_dense:
        raise ValueError(
            "compression and sparse_as_dense are for gradients that are summed over the ranks, and this training "
            "sends parameters instead; leave them out, or use sync='allreduce' with a policy without local updates"
        )
    return LocalUpdates(trained) if session.mixing is None else NeighbourAverage(trained, session.mixing)
