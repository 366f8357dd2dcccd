"""Memory of a bucket that is still in use: the bucket leaves it before it writes in a round, and takes another.

The memory of a bucket serves in every round, so a gradient of an earlier round is overwritten. Training may still read
it: as the gradient of another parameter, if the user has put it there, or because the optimizer keeps it for its next
step. If the bucket takes other memory, both are exact.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from hvd_hetero.errors import RoundStateError
from torch_hooks.gradients.arrangement import Arrangement
from torch_hooks.gradients.buckets import Bucket, Gradient
from torch_hooks.gradients.memory import address

__all__ = ["MemoryInUse", "kept_by"]

logger = logging.getLogger(__name__)


class MemoryInUse:
    """Finds buckets whose memory is in use, by gradients or by the optimizer.

    Searching all that an optimizer keeps would show in every step. So it is done after 1, 2, 4, 8, … rounds, and
    after every round once gradients were found there.
    """

    def __init__(
        self, arrangement: Arrangement, optimizer: torch.optim.Optimizer, of_the_loop: list[Arrangement]
    ) -> None:
        self._arrangement = arrangement
        self._optimizer = optimizer
        self._of_the_loop = of_the_loop
        """The arrangements of all the loop's optimizers: one's gradient may be put back for another's parameter."""
        self._known: tuple[list[int], list[Bucket]] | None = None
        """Bounds of all memories, in order, and the bucket of each; None if a bucket may have another by now."""
        self._rounds = 0
        self._optimizer_keeps = False

    def leave(self) -> None:
        """Make buckets leave memory that is in use: once in a round, before anything is written."""
        self.opened()
        if self._arrangement not in self._of_the_loop:
            self._of_the_loop.append(self._arrangement)
        notes, gradients = [], []
        for arrangement in self._of_the_loop:
            for note, gradient in arrangement.present():
                if gradient is note.slot:
                    continue
                if note.arrived and not gradient._version:
                    continue  # the backward pass has made it, in separate memory
                if arrangement is self._arrangement and not note.arrived:
                    note.tensor = gradient  # so it need not be looked at when it arrives
                notes.append(note)
                gradients.append(gradient)
        self._leave(notes, gradients)
        self._leave_what_the_optimizer_keeps()

    def close(self) -> None:
        """Stop looking at these gradients: no round follows."""
        if self._arrangement in self._of_the_loop:
            self._of_the_loop.remove(self._arrangement)

    def opened(self) -> None:
        """Forget the known memories: a bucket may have another by now."""
        self._known = None

    def round_over(self) -> None:
        """Count the round: one that runs out of memory looks twice."""
        self._rounds += 1

    def leave_for(self, note: Gradient, gradient: torch.Tensor) -> None:
        """Make a bucket leave the memory in which this gradient lies, which has come there only since."""
        if gradient is not note.slot:
            self._leave([note], [gradient])

    def _leave(self, notes: list[Gradient], gradients: list[torch.Tensor]) -> None:
        owners = self._owners(gradients)
        for number, owner in owners:
            if owner.opened:
                parameter = notes[number].parameter
                name = next(each.names[parameter] for each in self._of_the_loop if parameter in each.names)
                raise RoundStateError(
                    f"the gradient of {name!r} was put into memory of an earlier p.grad, where gradients of this round "
                    "are written by now; put it there before backward(), or give it a tensor of its own"
                )
        if owners:  # a hook that puts one back is likely to put back more, later in this backward pass
            self._release(self._buckets())

    def _leave_what_the_optimizer_keeps(self) -> None:
        rounds = self._rounds
        if not self._optimizer_keeps and rounds & (rounds - 1):
            return
        in_use = [owner for _, owner in self._owners(list(kept_by(self._optimizer)))]
        self._release(in_use)
        if in_use and not self._optimizer_keeps:
            self._optimizer_keeps = True
            if rounds > 2:
                logger.warning(
                    "%s keeps p.grad for later steps. This was found after %d rounds; in those after round %d it may "
                    "have read gradients of another round; from now on it reads the right ones. To be exact from the "
                    "beginning, have it keep p.grad.clone()", type(self._optimizer).__name__, rounds, rounds // 2,
                )  # fmt: skip

    def _release(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            if not bucket.opened:
                bucket.release()
        self._known = None

    def _buckets(self) -> Iterator[Bucket]:
        return chain.from_iterable(arrangement.buckets for arrangement in self._of_the_loop)

    def _owners(self, tensors: list[torch.Tensor]) -> list[tuple[int, Bucket]]:
        """Return the numbers of tensors that lie in a bucket's memory, each with its bucket."""
        if not tensors:
            return []
        if self._known is None:
            buckets = sorted((b for b in self._buckets() if b.bounds), key=attrgetter("bounds"))
            self._known = [bound for bucket in buckets for bound in bucket.bounds], buckets
        bounds, buckets = self._known
        places = map(partial(bisect, bounds), _addresses(tensors))
        return [(number, buckets[place // 2]) for number, place in enumerate(places) if place % 2]


def kept_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield every tensor in an optimizer's attributes, such as its state, also in containers and inner optimizers."""
    seen: set[int] = set()
    to_see: list[Any] = [optimizer]
    while to_see:
        each = to_see.pop()
        if isinstance(each, torch.Tensor):
            yield each
        elif id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, torch.optim.Optimizer):
                to_see.append(vars(each))
            elif isinstance(each, dict):
                to_see.extend(each.values())
            elif isinstance(each, (list, tuple, set, frozenset, deque)):
                to_see.extend(each)


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    try:
        return list(map(address, tensors))
    except RuntimeError:  # one in rows has an address only for its numbers
        return [_address(tensor) for tensor in tensors]


def _address(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    return address(tensor) if tensor.layout is torch.strided else 0
