"""One stretch of memory for the gradients of a bucket, so that they travel as one tensor.

To Horovod a bucket of n gradients is then one name to agree on instead of n, and there is one copy of each instead of
two, into a buffer and out again. (Horovod still has a buffer for what is small and ready at the same time.) Large ones
are copied as soon as they are computed, while they are in the processor's cache, and multiplied by the weight of this
rank on the way.

The memory serves in every round: a gradient that the user keeps is overwritten in the next one, as PyTorch's
DDP does with ``gradient_as_bucket_view``. To keep one, clone it. A bucket takes other memory if training
itself still reads a former gradient (``gradients.memory_in_use``).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, methodcaller

import torch

__all__ = ["BucketMemory", "address"]

_kind = attrgetter("shape", "dtype", "device")
_strides = methodcaller("stride")
address = methodcaller("data_ptr")
_ALIGNMENT = 64  # bytes


class BucketMemory:
    """The memory in which the gradients of these parameters, of one type and on one device, lie next to each other.

    Each lies as its parameter does: fused optimizers walk through both in the order of their addresses. And each is a
    tensor with its own version, which shows a change. After them there is room for so many numbers more.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], room: int = 0) -> None:
        first = parameters[0]
        step = _ALIGNMENT // first.element_size()
        starts = [0]
        for parameter in parameters:
            starts.append(starts[-1] + -(-parameter.numel() // step) * step)
        self.whole = torch.empty(starts[-1] + room, dtype=first.dtype, device=first.device)
        self.bounds = address(self.whole), address(self.whole) + self.whole.nbytes
        """Its first address, and the first one behind it."""
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

    def fits(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether it serves these parameters as they are now: they, and the gradients, lie as they did."""
        return _lie(parameters) == self._lay and not self.moved()

    def moved(self) -> list[int]:
        """Return the numbers of moved gradients: ``gradient.data = …`` moves one without a new version."""
        now = list(map(address, self.slots))
        return [] if now == self._addresses else [n for n, at in enumerate(now) if at != self._addresses[n]]


def _lie(tensors: Sequence[torch.Tensor]) -> list[object]:
    return [*map(_kind, tensors), *map(_strides, tensors)]
