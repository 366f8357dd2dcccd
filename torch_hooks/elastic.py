"""Elastic state for PyTorch: what a training goes back to when ranks were lost, and gives to ranks that join.

    import horovod.torch as hvd
    from torch_hooks.elastic import TorchState

    @hvd.elastic.run
    def train(state):
        balance = LoadBalance(global_batch=512)             # make these three again after every reset
        loader = BalancedLoader(dataset, balance, shuffle=True)
        optimizer = DistributedOptimizer(state.optimizer, balance, model.named_parameters())
        state.follow(balance, loader)                       # go on where the last commit stood
        for epoch in range(loader.epoch_at_hand, epochs):
            for x, y in loader:
                ...                                         # commits happen in between, on every rank alike

    train(TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1)))

Horovod's ``TorchState`` and ``ElasticSampler`` count samples by a batch that is the same on every rank. Here the place
in the data is the cursor that all ranks share, and a commit keeps model, optimizer, cursor, predictors, plans
and the policy's state as of the same round.

Differences from Horovod's state: optimizer state is copied when it is restored, too, so that a second failure finds the
commit as it was; a failure before the next commit restores what ``sync()`` brought; and ``Member``'s differences.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it, else after hvd.init(), where all ranks wait for one that joins

from hvd_hetero.commits import Every, every
from hvd_hetero.elastic import Member
from hvd_hetero.errors import RoundStateError
from torch_hooks.beside.stepping_optimizers import is_horovods
from torch_hooks.data.micro_batches import MicroBatches
from torch_hooks.load_balance import LoadBalance
from torch_hooks.loader import BalancedLoader
from torch_hooks.parameters.averaging import average_everywhere
from torch_hooks.parameters.broadcast import broadcast_state, suitable
from torch_hooks.parameters.keeping import copied
from torch_hooks.session import TorchSession
from torch_hooks.wires.choice import over_process_groups, wire_here
from torch_hooks.wrapped_optimizer import WrappedOptimizer

_INSTEAD = (
    "under torchrun --max-restarts use torch_hooks.SavedTraining, which resumes from a file after a restart "
    "(docs/pytorch.md)"
)
try:
    from horovod.common.elastic import ObjectState
    from horovod.common.exceptions import HorovodInternalError
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"torch_hooks.elastic is for elastic jobs of Horovod, which is not installed; {_INSTEAD}", name=error.name
    ) from error

_WITH_RATES_OF_THEIR_OWN = (
    torch.optim.lr_scheduler.OneCycleLR,
    torch.optim.lr_scheduler.CyclicLR,
    torch.optim.lr_scheduler.SequentialLR,
    torch.optim.lr_scheduler.ChainedScheduler,
)


class TorchState(Member, ObjectState):  # type: ignore[misc]
    """Model, optimizer, place in the data, and your own values; for ``hvd.elastic.run``.

    ``commit()`` keeps them in the memory of this process, and checks whether hosts have come or gone. ``restore()``
    goes back to the last commit, ``sync()`` gives all ranks rank 0's state.

    Parameters
    ----------
    model, optimizer
        The plain ones; the ``DistributedOptimizer`` is made in the function that runs, since making it is a collective.
        Beside Horovod's own optimizer (``LoadBalance.scale``), that one.
    rounds_per_commit
        A commit copies all state and is a collective; rounds since the last one are lost in a failure, and done
        again. "auto": as many as keep commits within 1 % of the time, as rank 0 measures it. A commit is due
        before the first round that follows so many others, in the same epoch or the next one, when the body of the
        loop, or the code between two epochs, is done with them. None: only when you call ``commit()`` yourself,
        between two iterations over the loader.
    scale_learning_rate
        If the ranks of a new membership have another global batch than the commit (``global_batch=64 *
        hvd.size()``), multiply the learning rates by as much: constant batches per rank, and the linear rule. Without
        it they stay as they are. Under a constant global batch, the default, nothing has to change.
    values
        Further objects, which become attributes. Objects with ``state_dict`` and ``load_state_dict`` (a schedule, a
        ``GradScaler``) are kept by these, anything else as it is.
    """

    _failure = HorovodInternalError

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        rounds_per_commit: Every | None = "auto",
        scale_learning_rate: bool = False,
        **values: Any,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if isinstance(optimizer, WrappedOptimizer) or not is_horovods(optimizer):
            suitable(optimizer)
        if over_process_groups():
            raise ValueError(
                f"TorchState is for elastic jobs of Horovod, and the ranks use torch.distributed; {_INSTEAD}"
            )
        if rounds_per_commit is not None:
            remedy = "None commits only where you call commit() yourself"
            rounds_per_commit = every("rounds_per_commit", rounds_per_commit, remedy=remedy)
        self._check_names(values)
        for name, value in values.items():
            if scale_learning_rate and isinstance(value, _WITH_RATES_OF_THEIR_OWN):
                raise ValueError(
                    f"scale_learning_rate=True cannot scale {name}, a {type(value).__name__}, which keeps learning "
                    "rates in many places. Use a schedule that multiplies, such as LambdaLR, or scale it yourself "
                    "by hvd.size() in the function that runs"
                )
        self.model = model
        self.optimizer = optimizer
        self.rounds_per_commit = rounds_per_commit
        self.scale_learning_rate = scale_learning_rate
        own = {name: value for name, value in values.items() if _keeps_itself(value)}
        self._parts: dict[str, Any] = {"model": model, "optimizer": optimizer, **own}
        for name, value in own.items():
            setattr(self, name, value)
        self._batches: MicroBatches | None = None
        self._inside = False
        self._saved_parts: dict[str, Any] = {}
        self._save_parts()
        plain = {name: value for name, value in values.items() if name not in own}
        super().__init__(_of_rank_0, lambda: wire_here().rank, **plain)

    def follow(self, balance: LoadBalance, loader: BalancedLoader | None = None) -> None:
        """Go on where the state stands, with a new ``LoadBalance`` and loader; a collective call, before any round.

        Without a loader, the place in your own data is one of your values, and so is the call of ``commit()``.
        """
        if not isinstance(balance, LoadBalance):
            raise TypeError(f"balance must be a LoadBalance, got {type(balance).__name__}")
        batches = None if loader is None else loader._micro_batches
        if batches is not None and batches.before_round is not None:
            raise ValueError("loader is followed by a SavedTraining or a TorchState already; keep to one of them")
        if batches is not None and not batches.cutter.order.survives_resets:
            raise ValueError(
                "a loader with stream='shard' cannot be elastic if each rank has a shard of its own: other ranks "
                "would have other shards, and samples that lost ranks have done are not known. Use stream='whole', "
                "a dataset with num_shards and shard(), or data with random access"
            )
        self._follow_session(balance._session)
        self._batches = batches
        if batches is not None:
            if self._membership.cursor is not None:
                batches.cutter.load_state_dict(self._membership.cursor)
            batches.before_round = self._commit_if_due

    def commit(self) -> None:
        """Keep everything as it is, and ask whether hosts have come or gone; on every rank, between two rounds."""
        if self._batches is not None and self._batches.iterating and not self._inside:
            raise RoundStateError(
                "commit() was called inside an iteration over the loader, whose body does not run on a rank "
                "without data. Use rounds_per_commit, which commits on every rank, or call commit() between two "
                "iterations"
            )
        super().commit()

    def sync(self) -> None:
        """Give all ranks rank 0's state; a collective call, and the first of a membership.

        No ``LoadBalance`` exists yet, so it travels by Horovod, or between ranks that are threads.
        """
        wire = wire_here()
        shared = self._receive_state(wire)
        if shared.mixes:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            average_everywhere(wire, parameters, "elastic", counts=self._membership.has_taken_part)
        for name, part in self._parts.items():
            broadcast_state(wire, part, f"elastic.{name}")
        self._forget_gradients()
        super().sync()
        self._accept_state(shared)

    def _commit_if_due(self) -> None:
        if self.rounds_per_commit is None or not self._commit_is_due(self.rounds_per_commit):
            return
        self._inside = True
        try:
            self.commit()
        finally:
            self._inside = False

    def _cursor(self) -> Mapping[str, Any] | None:
        return None if self._batches is None else self._batches.state_dict()

    def _hang_up(self) -> None:
        from horovod.torch import shutdown

        shutdown()

    def _let_go(self, session: TorchSession) -> None:
        if self._batches is not None:
            self._batches.before_round = None
            self._batches = None
        for optimizer in session.optimizers:
            with contextlib.suppress(RoundStateError):  # a collective failed between two notes of one step
                optimizer.close()

    def _scale_rates(self, factor: float) -> None:
        optimizers = [part for part in self._parts.values() if hasattr(part, "param_groups")]
        for group in {id(group): group for optimizer in optimizers for group in optimizer.param_groups}.values():
            for name in ("lr", "initial_lr"):
                if name in group:
                    group[name] = group[name] * factor
        for part in self._parts.values():
            if hasattr(part, "base_lrs"):  # a schedule's own copy of where it started
                part.base_lrs = [rate * factor for rate in part.base_lrs]

    def _forget_gradients(self) -> None:
        """Clear the gradients of a round that came to nothing."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _load_parts(self) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(copy.deepcopy(self._saved_parts[name]))
        self._forget_gradients()

    def _save_parts(self) -> None:
        former = self._saved_parts
        now = {name: part.state_dict() for name, part in self._parts.items()}  # one that fails leaves the commit whole
        self._saved_parts = {name: copied(state, former.get(name)) for name, state in now.items()}


def _of_rank_0(value: Any) -> Any:
    return wire_here().broadcast_object(value, root_rank=0, name="elastic.values")


def _keeps_itself(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
