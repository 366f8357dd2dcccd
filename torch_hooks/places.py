"""One stretch of memory for the gradients of a bucket, so that they travel as one tensor.

To Horovod a bucket of n gradients is then one name to agree on instead of n, and there is one copy of each instead of
two, into a buffer and out again. (Horovod still has a buffer for what is small and ready at the same time.) Large ones
are copied as soon as they are computed, while they are in the processor's cache, and multiplied by the weight of this
rank on the way.

The memory serves again in the next round, unless somebody has kept a gradient of the last one: that stays as it is, as
users of ``zero_grad(set_to_none=True)`` expect, and there is new memory for what is to come. Whoever keeps one small
gradient keeps, and saves, the memory of all: keep a clone. What refers to an ``untyped_storage()`` alone is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from operator import attrgetter, methodcaller
from sys import getrefcount

import torch

from torch_hooks.shared_memory import users

__all__ = ["Places"]

_kind = attrgetter("shape", "dtype", "device")
_strides = methodcaller("stride")
_address = methodcaller("data_ptr")
_uses = methodcaller("_use_count")  # not public: by what is written in C++, which Python may not count
_COUNTED = hasattr(torch.Tensor, "_use_count")  # older versions of PyTorch have no such thing
_ALIGNMENT = 64  # bytes


class Places:
    """Where the gradients of these parameters, of one type and on one device, lie next to each other.

    Each lies as its parameter does: fused optimizers walk through both in the order of their addresses. And each is a
    tensor with a version of its own, which tells a change.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        first = parameters[0]
        step = _ALIGNMENT // first.element_size()
        starts = [0]
        for parameter in parameters:
            starts.append(starts[-1] + -(-parameter.numel() // step) * step)
        self.whole = torch.empty(starts[-1], dtype=first.dtype, device=first.device)
        storage = self.whole.untyped_storage()
        self.of: list[torch.Tensor] = []
        for parameter, start, next_start in zip(parameters, starts, starts[1:], strict=False):
            contiguous = parameter.is_contiguous()
            strides = (parameter if contiguous else torch.empty_like(parameter, device="meta")).stride()
            place = torch.empty(0, dtype=first.dtype, device=first.device)
            self.of.append(place.set_(storage, start, parameter.shape, strides))
            if (end := start + parameter.numel()) < next_start:
                self.whole[end:next_start] = 0  # and stays so, whatever is added
        self._addresses = list(map(_address, self.of))
        self._lay = _lie(parameters)
        self._unused = 0, 0, 0

    def handed_out(self) -> None:
        """Note how many references there are while nobody else has any."""
        uses = max(map(_uses, self.of)) if _COUNTED else 0
        self._unused = max(map(getrefcount, self.of)), uses, users(self.whole.untyped_storage())

    def serve(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether they can be used again: nobody else refers to them, and both lie as they did."""
        if not _COUNTED:
            return False
        most_references, most_uses, all_users = self._unused
        references, uses = list(map(getrefcount, self.of)), list(map(_uses, self.of))
        if max(references) > most_references or max(uses) > most_uses:
            # A gradient that is still one is used by its parameter, which PyTorch 2.13 counts as a reference, too.
            still = [parameter.grad is place for parameter, place in zip(parameters, self.of, strict=True)]
            of_each = zip(references, uses, still, strict=True)
            if any(r > most_references + more or u > most_uses + more for r, u, more in of_each):
                return False
        same = users(self.whole.untyped_storage()) == all_users and _lie(parameters) == self._lay
        return same and not any(self.moved())

    def moved(self) -> Iterator[int]:
        """The numbers of those that lie elsewhere now: ``gradient.data = …`` takes one away, which no version tells."""
        if list(map(_address, self.of)) == self._addresses:
            return iter(())
        return (n for n, was in zip(count(), self._addresses) if self.of[n].data_ptr() != was)


def _lie(tensors: Sequence[torch.Tensor]) -> list[object]:
    return [*map(_kind, tensors), *map(_strides, tensors)]
