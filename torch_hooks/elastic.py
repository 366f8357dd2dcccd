"""Elastic state for PyTorch: what a training goes back to when ranks were lost, and hands to those that come.

    import horovod.torch as hvd
    from torch_hooks.elastic import TorchState

    @hvd.elastic.run
    def train(state):
        balance = LoadBalance(global_batch=512)             # these three anew after every reset
        loader = BalancedLoader(dataset, balance, shuffle=True)
        optimizer = DistributedOptimizer(state.optimizer, balance, model.named_parameters())
        state.follow(balance, loader)                       # go on where the last commit stood
        for epoch in range(loader.epoch_at_hand, epochs):
            for x, y in loader:
                ...                                         # commits happen in between, on every rank alike

    train(TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1)))

Horovod's ``TorchState`` and ``ElasticSampler`` count samples by a batch that is the same on every rank. Here the place
in the data is the cursor that all ranks share, and what was committed is model, optimizer, cursor, predictors, plans
and the policy's state as of one and the same round.

Differences from Horovod's state: optimizer state is copied when it is restored, too, so that a second failure finds the
commit as it was; what ``sync()`` brings is what a failure before the next commit restores; ``sync()`` follows every
change of hosts, for ranks may be ahead in the data by different numbers of rounds, or hold different models (D-PSGD).
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HostsUpdatedInterrupt

from hvd_hetero.errors import RoundStateError
from hvd_hetero.membership import Survival
from torch_hooks.load_balance import LoadBalance
from torch_hooks.loader import BalancedLoader
from torch_hooks.parameter_averaging import average_everywhere
from torch_hooks.parameters import broadcast_state, suitable

__all__ = ["TorchState"]

logger = logging.getLogger(__name__)

_OURS = ("resets",)


class TorchState(ObjectState):  # type: ignore[misc]
    """Model, optimizer, place in the data, and values of your own; for ``hvd.elastic.run``.

    ``commit()`` keeps them in the memory of this process, and asks whether hosts have come or gone. ``restore()`` goes
    back to the last commit, ``sync()`` gives all ranks what rank 0 has.

    Parameters
    ----------
    model, optimizer
        The plain ones; the ``DistributedOptimizer`` is made in the function that runs, since making it is a collective.
    rounds_per_commit
        A commit copies all state and is a collective; what was done since the last one is lost in a failure, and done
        again. It is due before the first round that follows so many others, in the same epoch or the next one, when the
        body of the loop, or the code between two epochs, is done with these. None: only where you call ``commit()``
        yourself, between two iterations over the loader.
    scale_learning_rate
        Where the ranks of a new membership have another global batch than those of the commit (``global_batch=64 *
        hvd.size()``), multiply the learning rates by as much: constant batches per rank, and the linear rule. Without
        it they stay as they are. Under a constant global batch, the default, nothing has to change.
    values
        Further objects, which become attributes. What has ``state_dict`` and ``load_state_dict`` (a schedule, a
        ``GradScaler``) is kept by them, anything else as it is.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        rounds_per_commit: int | None = 100,
        scale_learning_rate: bool = False,
        **values: Any,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        suitable(optimizer)
        if rounds_per_commit is not None and (
            isinstance(rounds_per_commit, bool) or not isinstance(rounds_per_commit, int) or rounds_per_commit < 1
        ):
            raise ValueError(
                f"rounds_per_commit must be a whole number of rounds, 1 or more, got {rounds_per_commit!r}; None "
                "commits only where you call commit() yourself"
            )
        if taken := [name for name in values if hasattr(type(self), name) or name in _OURS]:
            raise ValueError(f"values must have names of their own; {', '.join(taken)} mean something here already")
        self.model = model
        self.optimizer = optimizer
        self.rounds_per_commit = rounds_per_commit
        self.scale_learning_rate = scale_learning_rate
        self.resets = 0
        """how often the membership has changed, the same on every rank: to name files by, such as telemetry"""
        own = {name: value for name, value in values.items() if _keeps_itself(value)}
        self._parts: dict[str, Any] = {"model": model, "optimizer": optimizer, **own}
        for name, value in own.items():
            setattr(self, name, value)
        self._survival = Survival()
        self._place: dict[str, Any] | None = None
        self._balance: LoadBalance | None = None
        self._loader: BalancedLoader | None = None
        self._mixes = False
        self._committed = 0
        self._inside = False
        self._save_parts()
        plain = {name: value for name, value in values.items() if name not in own}
        super().__init__(hvd.broadcast_object, hvd.rank, **plain)
        self._save_values()

    def follow(self, balance: LoadBalance, loader: BalancedLoader | None = None) -> None:
        """Go on where the state stands, with a new ``LoadBalance`` and loader; a collective call, before any round.

        Without a loader, the place in your own data is one of your values, and so is the call of ``commit()``.
        """
        if not isinstance(balance, LoadBalance):
            raise TypeError(f"balance must be a LoadBalance, got {type(balance).__name__}")
        if loader is not None and not loader.survives_resets:
            raise ValueError(
                "a loader with stream='shard' cannot be elastic: with other ranks there are other parts, and nobody "
                "knows which samples of theirs were done; use stream='whole', or data with random access"
            )
        self._leave()
        self._balance, self._loader = balance, loader
        self._mixes = balance.mixing is not None
        if (common := self._survival.common) is not None:
            self._adapt_rates(common["global_batch"], balance.balancer.global_batch)
        self._survival.take_up(balance.balancer, hvd, balance.prefix)
        if loader is not None:
            if self._place is not None:
                loader.go_on(self._place)
            loader.between_rounds = self._commit_if_due
        self._committed = balance.rounds

    def commit(self) -> None:
        """Keep everything as it is, and ask whether hosts have come or gone; on every rank, between two rounds."""
        if self._loader is not None and self._loader.iterating and not self._inside:
            raise RoundStateError(
                "commit() inside an iteration over the loader, whose body does not run on a rank without data: leave "
                "it to rounds_per_commit, which commits on every rank, or call commit() between two iterations"
            )
        super().commit()

    def save(self) -> None:
        """Keep everything as it is now; ``commit()`` does so."""
        if self._balance is not None:
            self._survival.keep(self._balance.balancer)
            self._committed = self._balance.rounds
            self._place = None if self._loader is None else self._loader.state_dict()
        self._save_parts()
        super().save()
        self._save_values()

    def restore(self) -> None:
        """Everything as at the last commit."""
        self._leave()
        for name, part in self._parts.items():
            part.load_state_dict(copy.deepcopy(self._saved_parts[name]))
        self._forget_gradients()
        super().restore()
        self._save_values()

    def sync(self) -> None:
        """Give all ranks what rank 0 has; a collective call, and the first of a membership."""
        self._leave()
        common = (self._survival.common, self._place, self.resets, self._mixes)
        common = hvd.broadcast_object(common, root_rank=0, name="elastic.common")
        self._survival.common, self._place, self.resets, self._mixes = common
        if self._mixes:  # each survivor has a model of its own, and their mean is what they have learnt
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            average_everywhere(parameters, "elastic", counts=self._survival.has_taken_part)
        for name, part in self._parts.items():
            broadcast_state(part, f"elastic.{name}")
        self._forget_gradients()
        super().sync()
        self._save_parts()
        self._save_values()

    def reset(self) -> None:
        """The membership has changed (Horovod's way of saying so, on survivors)."""
        self._leave()
        self.resets += 1

    def check_host_updates(self) -> None:
        """Raise if hosts have come or gone, so that the ranks meet anew."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            raise HostsUpdatedInterrupt(skip_sync=False) from None

    @property
    def hosts_have_changed(self) -> bool:
        """Whether this rank has heard that hosts came or went, of which the next commit tells all."""
        return not self._host_messages.empty()

    def _commit_if_due(self) -> None:
        assert self._balance is not None, "its loader has called"
        if self.rounds_per_commit is None or self._balance.rounds - self._committed < self.rounds_per_commit:
            return
        self._inside = True
        try:
            self.commit()
        finally:
            self._inside = False

    def _leave(self) -> None:
        """Let go of the former membership's objects: hooks on parameters, signals, files."""
        balance, self._balance = self._balance, None
        if self._loader is not None:
            self._loader.between_rounds = None
            self._loader = None
        if balance is not None:
            if balance.optimizer is not None:
                with contextlib.suppress(RoundStateError):  # a collective failed between two notes of one step
                    balance.optimizer.close()
            balance.close()

    def _adapt_rates(self, before: int, now: int) -> None:
        if before == now:
            return
        if not self.scale_learning_rate:
            logger.warning(
                "the global batch was %d and is %d now; learning rates stay as they are (scale_learning_rate=True "
                "would scale them, too)", before, now,
            )  # fmt: skip
            return
        factor = now / before
        for group in self.optimizer.param_groups:
            for name in ("lr", "initial_lr"):
                if name in group:
                    group[name] = group[name] * factor
        for part in self._parts.values():
            if hasattr(part, "base_lrs"):  # a schedule's own copy of where it started
                part.base_lrs = [rate * factor for rate in part.base_lrs]
        logger.warning("the global batch was %d and is %d now; learning rates were scaled alike", before, now)

    def _forget_gradients(self) -> None:
        """Of a round that came to nothing."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _save_parts(self) -> None:
        self._saved_parts: Mapping[str, Any] = {
            name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()
        }

    def _save_values(self) -> None:
        """Copies, so that what changes in place does not change in the commit."""
        self._saved_state: dict[str, Any] = copy.deepcopy(self._saved_state)


def _keeps_itself(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
