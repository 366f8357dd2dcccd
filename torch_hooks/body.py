"""A watch over the loop's body in the first rounds, if it may run unequally often on ranks.

Under policies with several micro-batches in a round it may, or if ``collate_fn`` leaves samples out. What the body
does for an update, and not for its batch, is missing then on some rank: the others wait in a collective for ever, or
learning rates and parameters drift apart. That may happen hours into a training. But it shows in the body's first run,
on each rank by itself, with nothing sent: outside of the loader and of ``step()``, nothing may change that ranks must
have in common.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Container, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hvd_hetero.consistency import settings_of
from hvd_hetero.errors import RoundStateError
from hvd_hetero.watchdog.whereabouts import locate
from torch_hooks.wires.choice import TorchWire

__all__ = ["Body", "Differs", "Watched", "another_batch"]

logger = logging.getLogger(__name__)

_ROUNDS = 2  # what is done in both is done in all, so also in a round in which a rank has no data
_CALLED_BY_USERS = ("torch_hooks.evaluation", "torch_hooks.load_balance", "torch_hooks.parameters.broadcast")
_BETWEEN = (__name__, "horovod.", "torch.distributed.", "torch_hooks.wires.", "hvd_hetero.communication.")
"""Modules between the wire and its caller; a user's own wire counts as one, too."""
_COLLECTIVE = (
    "call collectives after the loop (average_by_samples for what was added up in it), or in "
    "optimizer.register_step_post_hook(…), which runs on every rank"
)
_WAYS_OUT = {
    "learning rates or other hyper-parameters are changed": "change them in optimizer.register_step_post_hook(…) (a "
    "warm-up by balance.rounds: in register_step_pre_hook), or after the epoch",
    "parameters are changed": "change them in optimizer.register_step_post_hook(…)",
    "gradients are changed after synchronize()": "clip in optimizer.register_step_pre_hook(…)",
}
_ANOTHER_BATCH = "batch() of another LoadBalance is called"
_ALSO = "give the other optimizer balance.also() of this one's LoadBalance, and leave batch() out"


class Differs(NamedTuple):
    """The reason why bodies do not run equally often on all ranks."""

    why: str
    now: bool = False
    """True: some rank would not take part in a collective of this body, in this very round."""


class Watched(Protocol):
    """What the watch needs of an optimizer whose loop it follows."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Its parameters and hyper-parameters."""

    @property
    def common(self) -> bool:
        """True if all ranks hold the same parameters after each round."""

    @property
    def synchronised(self) -> bool:
        """True if the gradients are the sums of all ranks, and the step has not followed yet."""

    @property
    def scaled(self) -> bool:
        """True if a gradient scaler changes its gradients, on every rank."""


class _Look(NamedTuple):
    """Figures that no body may change, in the order of the messages."""

    settings: list[float]
    parameters: list[float]
    gradients: list[float]
    """Empty if they are not the sums of all ranks."""


class Body:
    """The body of one loader's loop, from ``enter`` to ``leave``, without the work of ``step()``."""

    def __init__(self, wire: TorchWire, *, wanted: bool) -> None:
        self._wire = wire
        self.watching = False
        """True: the body runs, and is watched."""
        self._wanted = wanted
        self._differs: Differs | None = None
        self._optimizers: Sequence[Watched] = ()
        self._round = -1
        self._rounds: set[int] = set()
        self._said: set[str] = set()
        self._look: _Look | None = None
        self._stepping = False
        self._thread = 0

    def is_new(self, round: int) -> bool:
        """Return whether the body of this round is among the first."""
        if not self._wanted or (len(self._rounds) == _ROUNDS and round not in self._rounds):
            return False
        self._rounds.add(round)
        return True

    def enter(self, round: int, optimizers: Sequence[Watched], differs: Differs) -> None:
        """Begin to watch the body, in this round."""
        self._round, self._optimizers, self._differs = round, optimizers, differs
        self._stepping, self._thread = False, threading.get_ident()
        self.watching = True
        _open.append(self)
        self._wire.listen(_hear)
        self.note()

    def leave(self) -> None:
        """End the watch: the body has ended by itself."""
        if self.watching:
            self._compare()
            self.close()

    def close(self) -> None:
        """End the watch, however the body has ended."""
        if self.watching:
            self.watching = False
            _open.remove(self)
            self._optimizers, self._look = (), None

    def note(self) -> None:
        """Note the present state: what ``step()`` and ``synchronize()`` have done is done on every rank."""
        self._look = self._now()

    def step_begins(self) -> None:
        """Stop watching: what follows is not the body's, including hooks of the user."""
        self._compare()
        self._stepping = True

    def step_ends(self) -> None:
        """Watch again: what follows is the body's."""
        self._stepping = False
        self.note()

    def heard(self, collective: bool = True) -> None:
        """Note that a collective has begun in this process, or a batch of another training."""
        if self._stepping or threading.get_ident() != self._thread or sys.exc_info()[0] is not None:
            return
        if not collective:
            self._found(_ANOTHER_BATCH, _ALSO)
        elif not _ours({kind.__module__ for kind in type(self._wire).__mro__}):
            self._found(f"{locate(self._thread, ()).where}: a collective is called", _COLLECTIVE, kind=_COLLECTIVE)

    def _now(self) -> _Look:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        parameters = _parameters(o for o in self._optimizers if o.common)
        summed = _parameters(o for o in self._optimizers if o.common and o.synchronised and not o.scaled)
        gradients = [parameter.grad for parameter in summed if parameter.grad is not None]
        return _Look([settings_of([group]) for group in groups], _norms(parameters), _norms(gradients))

    def _compare(self) -> None:
        before, now = self._look, self._now()
        assert before is not None, "it is noted where the body begins"
        for (what, way_out), a, b in zip(_WAYS_OUT.items(), before, now, strict=True):
            if len(a) == len(b) and not np.array_equal(a, b, equal_nan=True):
                self._found(what, way_out)

    def _found(self, what: str, way_out: str, kind: str = "") -> None:
        """Raise if other ranks wait for this one in vain; otherwise warn once."""
        differs, kind = self._differs, kind or what
        assert differs is not None, "the body runs"
        text = (
            f"round {self._round}: {what} in the loop's body, which does not run alike on all ranks: {differs.why}; "
            f"{way_out}"
        )
        if differs.now and kind == _COLLECTIVE:
            self.close()
            raise RoundStateError(text)
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s", text)


_open: list[Body] = []


def another_batch(own: Body) -> None:
    """Note in all other open bodies that a batch is announced to the training of this one."""
    for body in _open.copy():
        if body is not own:
            body.heard(collective=False)


def _hear() -> None:
    """Note in all open bodies that a collective begins in this process."""
    for body in _open.copy():
        body.heard()


def _ours(wire: Container[str]) -> bool:
    """Return whether this package now uses the wire, of these modules, for the current round."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (_module(frame) in wire or _module(frame).startswith(_BETWEEN)):
        frame = frame.f_back
    module = _module(frame)
    return module.startswith("torch_hooks.") and module not in _CALLED_BY_USERS


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _parameters(optimizers: Iterable[Watched]) -> list[torch.Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    whole = [t.detach() for t in tensors if t.numel() and (t.is_floating_point() or t.is_complex())]
    whole = [tensor if tensor.layout is torch.strided else tensor.coalesce().values() for tensor in whole]
    return [float(norm) for norm in torch._foreach_norm(whole)] if whole else []
