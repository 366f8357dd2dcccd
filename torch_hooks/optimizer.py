"""The optimizer that synchronises: exact gradients from unequal batches, and the table riding along."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch

from hvd_hetero.errors import RoundStateError
from torch_hooks.load_balance import LoadBalance
from torch_hooks.parameters import (
    broadcast_optimizer_state,
    broadcast_parameters,
    named_groups,
    settings_of,
    suitable,
    witness_among,
)
from torch_hooks.waiting import wait

__all__ = ["DistributedOptimizer"]

_CLEARED = (
    "the gradient that this round has gathered so far is gone: call optimizer.zero_grad(), which keeps it until the "
    "round is complete, and not model.zero_grad()"
)
_WITHOUT_A_BATCH = (
    "a gradient came without a batch: iterate over a BalancedLoader, or announce your own batch with "
    "balance.batch(samples) before its forward pass. If this model has a new optimizer now, close() the former one; if "
    "the loss of another model reaches this one, freeze it meanwhile by requires_grad_(False)"
)


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer so that a round over all ranks is one step of the single process with the global batch.

    Inside a round of several micro-batches, ``zero_grad()`` and ``step()`` do nothing until the last one; so the loop
    of a user need not know how many there are. In the last backward pass every gradient goes on the wire as soon as it
    is there, with ``op=Sum`` and its weight already applied (factors handed to Horovod would have to be equal on all
    ranks). The rank's row of the table goes out just before the last gradient and is fused with it.

    What belongs to an update and not to a batch (clipping, unscaling, a schedule per step) has its place in
    ``register_step_pre_hook`` and ``register_step_post_hook``: they run once per round on every rank, while the loop's
    body runs once per micro-batch, and not at all on a rank without data. Ranks that differ in their learning rates or
    parameters are found out in the next round.

    Parameters and the optimizer's state are broadcast from rank 0 at construction. Buffers of a model (the running
    statistics of batch norm) are not parameters, and stay the user's: ``hvd.broadcast_parameters(model.state_dict(),
    0)``.

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
    """

    # A gradient scaler would hand its factor to a fused optimizer by attributes of this object, which never reach it.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        balance: LoadBalance,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    ) -> None:
        # No super().__init__(): all that it would set up is the wrapped optimizer's, and is reached through it.
        suitable(optimizer)
        if not isinstance(balance, LoadBalance):
            raise TypeError(f"balance must be the LoadBalance of this training, got {type(balance).__name__}")
        if balance.optimizer is not None:
            raise ValueError("balance already serves another optimizer; make one LoadBalance for each")
        self._inner = optimizer
        self._balancer = balance.balancer
        self._names = named_groups(optimizer, named_parameters)
        self._prefix = balance.prefix
        # Per gradient on its way: the handle, the gradient, and the version it had, which tells a change by the user.
        self._handles: dict[torch.Tensor, tuple[int, torch.Tensor, int]] = {}
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        self._listening: list[Any] = []
        self._table: tuple[int, torch.Tensor] | None = None
        self._synchronised = False
        self._skip = False
        self._table_dtype = torch.float64 if all(p.dtype == torch.float64 for p in self._names) else torch.float32
        self._expected = sum(p.requires_grad for p in self._names)
        for parameter in self._names:
            self._check_device(parameter)
            self._listen(parameter)
        self._witness = witness_among(self._names)
        broadcast_parameters(self._names, self._prefix)
        broadcast_optimizer_state(optimizer, self._prefix)
        balance.optimizer = self

    # What a round asks of it.

    def begin_micro_batch(self) -> None:
        """Bring the gradient accumulated so far to the units of the micro-batch that begins (see ``Balancer``)."""
        self._synchronised = False  # a gradient scaler may have left the last round's gradients unused
        self._kept = None
        if not self._balancer.accumulating:
            return
        self._kept = next(((p, p.grad) for p in self._names if p.requires_grad and p.grad is not None), None)
        if self._kept is None:
            raise RoundStateError(_CLEARED)
        factor = self._balancer.rescale
        if factor != 1.0:
            torch._foreach_mul_([p.grad for p in self._names if p.grad is not None], factor)

    def abandon_round(self) -> None:
        """Forget what an unfinished round has gathered."""
        if self._balancer.in_round:
            self._balancer.abandon()
            self._inner.zero_grad()

    def idle_round(self) -> None:
        """Take part in a round without data: contribute zeros, then update as everybody does."""
        self._inner.zero_grad()
        self.step()

    def synchronize(self) -> bool:
        """Wait for the summed gradients. Horovod's pattern for clipping works: synchronise, clip, step under
        ``skip_synchronize()``; inside a round of several micro-batches nothing happens, and the answer is False.
        """
        balancer = self._balancer
        if self._synchronised or not balancer.closing:
            return False
        if self._handles:
            self._expected = len(self._handles)  # gradients that arise by themselves, likely the same next time
        for parameter in self._names:
            if parameter.requires_grad and parameter not in self._handles:
                # No gradient arose here; another rank may have one, so zeros take part, as in Horovod.
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._reduce(parameter)
        if self._table is None:
            self._post_table()
        assert self._table is not None
        handle, vector = self._table
        wait(handle, *balancer.waiting())
        changed = None
        for parameter, (each, gradient, version) in self._handles.items():
            hvd.synchronize(each)
            if gradient._version != version:
                changed = parameter
        gradients = [gradient for _, gradient, _ in self._handles.values()]
        self._handles.clear()
        self._table = None
        correction = balancer.agree(vector.numpy())
        if changed is not None:
            raise RoundStateError(
                f"the gradient of {self._names[changed]!r} was changed between backward() and step(), while it was on "
                "its way to the other ranks. Clip or unscale in optimizer.register_step_pre_hook(…), or write: "
                "if optimizer.synchronize(): clip; with optimizer.skip_synchronize(): optimizer.step()"
            )
        if correction != 1.0:
            torch._foreach_mul_(gradients, correction)
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

    # What the training loop asks of it.

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Synchronise and update, at the end of a round; otherwise only note that the micro-batch is done."""
        if closure is not None:
            raise ValueError(
                "closure is not supported: it would compute gradients anew inside the step, on every rank at its own "
                "pace; compute the loss before step() and call step() without it"
            )
        balancer = self._balancer
        if not self._synchronised:
            if not balancer.in_round:
                raise RoundStateError(
                    "step() came without a batch: iterate over a BalancedLoader, or announce your own batch with "
                    "balance.batch(samples) before its forward pass"
                )
            if not balancer.closing:
                balancer.pause()
                return
            if self._skip:
                raise RoundStateError("step() under skip_synchronize() needs a call of synchronize() before it")
            self.synchronize()
        self._synchronised = False
        start = time.perf_counter()
        self._inner.step()
        balancer.applied(time.perf_counter() - start)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless a round is under way that still adds to them."""
        if self._handles:
            raise RoundStateError(
                "zero_grad() came after backward() and before step(): it would race with the synchronisation under way"
            )
        if self._balancer.accumulating:
            return
        self._inner.zero_grad(set_to_none=set_to_none)

    def close(self) -> None:
        """Stop listening to the parameters, so that another optimizer can train them."""
        for handle in self._listening:
            handle.remove()
        self._listening.clear()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the wrapped optimizer's state; between rounds only, on every rank."""
        if self._balancer.in_round:
            raise RoundStateError("load_state_dict() in the middle of a round; call it between rounds")
        self._inner.load_state_dict(dict(state_dict))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, the same on every rank, between rounds. They are named by their place."""
        if self._balancer.in_round:
            raise RoundStateError("add_param_group() in the middle of a round; call it between rounds")
        self._inner.add_param_group(param_group)
        group = len(self._inner.param_groups) - 1
        added = {p: f"group{group}.{i}" for i, p in enumerate(self._inner.param_groups[group]["params"])}
        self._names.update(added)
        for parameter in added:
            self._check_device(parameter)
            self._listen(parameter)
        broadcast_parameters(added, f"{self._prefix}.group{group}")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups, the very objects."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state, the very object."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self._inner.defaults

    def __getattr__(self, name: str) -> Any:
        # Hooks, flags of fused optimizers and whatever else a subclass has: all of it lives in the wrapped one.
        if name == "_inner":  # not there yet: a lookup before __init__ (copy, pickle) must not recurse
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled, being tied to the parameters and ranks of this job; "
            "save optimizer.state_dict() and load it into a new one"
        )

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r})"

    # Gradients on the wire.

    def _listen(self, parameter: torch.Tensor) -> None:
        # A parameter that is frozen now has no gradient to listen to; if it is thawed later, synchronize() takes it.
        if parameter.requires_grad:
            me = weakref.ref(self)  # a model may outlive its optimizer, and be trained by another

            def on_gradient(arrived: torch.Tensor) -> None:
                if (optimizer := me()) is not None:
                    optimizer._on_gradient(arrived)

            handle = parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
            self._listening.append(handle)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        balancer = self._balancer
        if not balancer.closing:
            if not balancer.in_round:
                raise RoundStateError(_WITHOUT_A_BATCH)
            if self._kept is not None and parameter is self._kept[0] and parameter.grad is not self._kept[1]:
                raise RoundStateError(_CLEARED)
            return
        if self._kept is not None and parameter is self._kept[0] and parameter.grad is not self._kept[1]:
            raise RoundStateError(_CLEARED)
        if parameter in self._handles:
            raise RoundStateError(
                f"the gradient of {self._names[parameter]!r} was computed twice before step(), and the first one is on "
                "its way already; add the losses and call backward() once per micro-batch"
            )
        if len(self._handles) + 1 == self._expected:
            self._post_table()
        self._reduce(parameter)

    def _reduce(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        name = self._names[parameter]
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {name!r} is sparse, which cannot be synchronised here; make the embedding with "
                "sparse=False"
            )
        if not gradient.is_contiguous():
            gradient = parameter.grad = gradient.contiguous()
        elif gradient.untyped_storage().nbytes() > gradient.nbytes:
            # A part of a larger tensor, as torch.cat of parameters leaves it: its version counts changes of all parts.
            gradient = parameter.grad = gradient.clone()
        weight = self._balancer.weight
        if weight == 0.0:
            gradient.zero_()  # and not a product, which would keep the NaN of a mean over no samples
        elif weight != 1.0:
            gradient.mul_(weight)
        handle = hvd.allreduce_async_(gradient, name=f"{self._prefix}.{name}", op=hvd.Sum)
        self._handles[parameter] = handle, gradient, gradient._version

    def _post_table(self) -> None:
        witness = 0.0 if self._witness is None else float(torch.linalg.vector_norm(self._witness.detach()))
        report = self._balancer.report(settings=settings_of(self._inner.param_groups), witness=witness)
        vector = torch.from_numpy(report).to(self._table_dtype)
        self._table = hvd.allreduce_async_(vector, name=f"{self._prefix}.table", op=hvd.Sum), vector

    def _check_device(self, parameter: torch.Tensor) -> None:
        policy = self._balancer.policy
        if parameter.device.type != "cpu" and policy.measures:
            raise ValueError(
                f"policy {policy.name!r} cannot time {parameter.device.type} parameters such as "
                f"{self._names[parameter]!r} yet; use policy='bsp' or StaticAllocation([…]) there"
            )
