"""The optimizer that synchronises: exact gradients from unequal batches, and the table riding along."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from hvd_hetero.errors import RoundStateError
from torch_hooks.arguments import OPTIMIZER, refuse, refuse_synchronised
from torch_hooks.load_balance import LoadBalance
from torch_hooks.parameters.broadcast import named_groups, suitable
from torch_hooks.updates import Updates
from torch_hooks.wrapped_optimizer import WrappedOptimizer

__all__ = ["DistributedOptimizer"]

_STOCK_SCALER = (
    "torch.amp.GradScaler would look for infinities in gradients of this rank alone; use "
    "torch_hooks.GradScaler(…, optimizer=optimizer), or call optimizer.synchronize() first and scaler.step(optimizer) "
    "under optimizer.skip_synchronize() if it returns True"
)


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
        **others: Any,
    ) -> None:
        refuse(others, OPTIMIZER, "DistributedOptimizer")
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
                "balance has begun beside a reducer of your own (balance.scale); make the DistributedOptimizer before "
                "the first batch, or keep to your reducer"
            )
        if session.optimizer is not None:
            raise ValueError(
                "balance already serves another optimizer; give this one balance.also(), which takes part in the same "
                "rounds (in the order of the steps), or close() that one between rounds"
            )
        super().__init__(optimizer)
        names = named_groups(optimizer, named_parameters)
        self._updates = Updates(
            optimizer, session, names, self._hooks, self, compression=compression, sparse_as_dense=sparse_as_dense
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronise and update, at the end of a round; otherwise only note that the micro-batch is done.

        A ``closure`` computes the gradient of this micro-batch, and is called exactly once. Returns what it returns.
        """
        return self._updates.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless a round is under way that still adds to them."""
        self._updates.zero_grad(set_to_none)

    def synchronize(self) -> bool:
        """Wait for the summed gradients.

        Horovod's pattern for clipping works: synchronise, clip, step under ``skip_synchronize()``. Inside a round of
        several micro-batches nothing happens, and the result is False.
        """
        return self._updates.synchronize()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """``step()`` within uses the gradients as they are: ``synchronize()`` has been called."""
        return self._updates.skip_synchronize()

    def average_parameters(self) -> None:
        """Give all ranks the mean of their parameters; on every rank, between rounds.

        Under D-PSGD and MATCHA ranks hold different models, and their mean is the result. Elsewhere it changes nothing.
        """
        self._updates.require_between_rounds("average_parameters()")
        self._updates.average_parameters()

    def close(self) -> None:
        """Let go of the parameters and, between rounds, of the ``LoadBalance``: another optimizer can go on with both.

        An unfinished round is forgotten, unless its sum has failed; then the ``LoadBalance`` is of no use any more.
        Hooks that were registered here are taken off the optimizer inside.
        """
        self._updates.close()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the wrapped optimizer's state; between rounds only, on every rank."""
        self._updates.require_between_rounds("load_state_dict()")
        self._inner.load_state_dict(dict(state_dict))
        self._updates.state_was_loaded()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, the same on every rank, between rounds. They are named by their position."""
        self._updates.require_between_rounds("add_param_group()")
        self._inner.add_param_group(param_group)
        group = len(self._inner.param_groups) - 1
        added = {p: f"group{group}.{i}" for i, p in enumerate(self._inner.param_groups[group]["params"])}
        self._updates.extend(added, group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # PyTorch's scaler looks here first. It would hand its factor to a fused optimizer by attributes of this object,
        # which never reach it; and it unscales by an operation that leaves a tensor's version as it was, so that no
        # later look would find it out.
        if not self._updates.synchronised:
            raise RoundStateError(_STOCK_SCALER)
        return False
