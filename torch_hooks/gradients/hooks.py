"""A listener for every gradient that a backward pass completes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["Listener"]


class Listener:
    """Calls ``tell(who, parameter, note)`` whenever the gradient of a parameter is there.

    ``note_of(parameter)`` gives the note once, when the hook is made: a look into a dictionary by tensor would cost
    every step. ``who`` is held weakly, because a model may outlive its optimizer and be trained by another; not as a
    weak method, whose every call costs more Python.
    """

    def __init__(
        self, who: Any, tell: Callable[[Any, torch.Tensor, Any], None], note_of: Callable[[torch.Tensor], Any]
    ) -> None:
        self._who = weakref.ref(who)
        self._tell = tell
        self._note_of = note_of
        self._handles: dict[torch.Tensor, Any] = {}

    def listen(self, parameters: Iterable[torch.Tensor]) -> None:
        """Listen to these parameters, too. A frozen one has no gradient: name it again once it is thawed."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._handles:
                hook = self._hook(self._note_of(parameter))
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _hook(self, note: Any) -> Callable[[torch.Tensor], None]:
        of, tell = self._who, self._tell

        def on_gradient(parameter: torch.Tensor) -> None:
            if (who := of()) is not None:
                tell(who, parameter, note)

        return on_gradient

    def close(self) -> None:
        """Listen no more."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
