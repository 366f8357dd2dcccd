"""One stretch of memory for the gradients of a bucket, so that they travel as one tensor.

To Horovod a bucket of n gradients is then one name to agree on instead of n, and there is one copy of each instead of
two, into a buffer and out again. (Horovod still has a buffer for what is small and ready at the same time.) Large ones
are copied as soon as they are computed, while they are in the processor's cache, and multiplied by the weight of this
rank on the way.

The memory serves again in the next round, unless somebody has kept a gradient of the last one: that stays as it is, as
users of ``zero_grad(set_to_none=True)`` expect, and there is new memory for what is to come. (What refers to an
``untyped_storage()`` alone is not seen.)
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, methodcaller
from sys import getrefcount

import torch

from torch_hooks.gradients.shared_memory import users

__all__ = ["BucketMemory", "address"]

_kind = attrgetter("shape", "dtype", "device")
_strides = methodcaller("stride")
address = methodcaller("data_ptr")
_uses = methodcaller("_use_count")  # not public: by what is written in C++, which Python may not count
_COUNTED = hasattr(torch.Tensor, "_use_count")  # older versions of PyTorch have no such thing
_ALIGNMENT = 64  # bytes


class BucketMemory:
    """Where the gradients of these parameters, of one type and on one device, lie next to each other.

    Each lies as its parameter does: fused optimizers walk through both in the order of their addresses. And each is a
    tensor with a version of its own, which tells a change. After them there is room for so many numbers more.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], room: int = 0) -> None:
        first = parameters[0]
        step = _ALIGNMENT // first.element_size()
        starts = [0]
        for parameter in parameters:
            starts.append(starts[-1] + -(-parameter.numel() // step) * step)
        self.whole = torch.empty(starts[-1] + room, dtype=first.dtype, device=first.device)
        self.room = self.whole[starts[-1] :].zero_()
        storage = self.whole.untyped_storage()
        self.slots: list[torch.Tensor] = []
        for parameter, start, next_start in zip(parameters, starts, starts[1:], strict=False):
            contiguous = parameter.is_contiguous()
            strides = (parameter if contiguous else torch.empty_like(parameter, device="meta")).stride()
            slot = torch.empty(0, dtype=first.dtype, device=first.device)
            self.slots.append(slot.set_(storage, start, parameter.shape, strides))
            if (end := start + parameter.numel()) < next_start:
                self.whole[end:next_start] = 0  # and stays so, whatever is added
        self._addresses = list(map(address, self.slots))
        self._lay = _lie(parameters)
        self._unused = 0, 0, 0

    def handed_out(self) -> None:
        """Note how many references there are while nobody else has any."""
        uses = max(map(_uses, self.slots)) if _COUNTED else 0
        self._unused = max(map(getrefcount, self.slots)), uses, users(self.whole.untyped_storage())

    def serve(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether they can be used again: both lie as they did, and nobody else refers to what is not still a gradient.

        What is one, because the user has put it back, was added to in place already, for all to see.
        """
        if _lie(parameters) != self._lay or self.moved():
            return False
        most_references, most_uses, all_users = self._unused
        references, alone = list(map(getrefcount, self.slots)), users(self.whole.untyped_storage()) == all_users
        uses = list(map(_uses, self.slots)) if _COUNTED else [most_uses + 1] * len(self.slots)
        if alone and max(references) <= most_references and max(uses) <= most_uses:
            return True
        each = zip(parameters, self.slots, references, uses, strict=True)
        others = [(r, u) for parameter, slot, r, u in each if parameter.grad is not slot]
        return not others or (alone and all(r <= most_references and u <= most_uses for r, u in others))

    def moved(self) -> list[int]:
        """The numbers of those that lie elsewhere now: ``gradient.data = …`` takes one away, which no version tells."""
        now = list(map(address, self.slots))
        return [] if now == self._addresses else [n for n, at in enumerate(now) if at != self._addresses[n]]


def _lie(tensors: Sequence[torch.Tensor]) -> list[object]:
    return [*map(_kind, tensors), *map(_strides, tensors)]
