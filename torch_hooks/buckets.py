"""Gradients of one round, and the buckets in which they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as hvd
import torch

from hvd_hetero.buckets import divide
from torch_hooks.shared_memory import shares_memory

__all__ = ["Bucket", "Gradient", "buckets_of", "flat", "weigh"]

# A product right after a gradient was computed finds it in the processor's cache, and costs a call of its own.
# At 256 KiB it gained 1 % of a step; the bound is arbitrary.
_WEIGHED_AT_ONCE = 2**17


class Gradient:
    """One parameter's gradient in the round at hand, and the version it had at last, which tells a change."""

    __slots__ = ("arrived", "at_once", "bucket", "parameter", "sent", "tensor", "version", "weighed")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.bucket: Bucket | None = None
        self.arrived = False
        self.weighed: float | None = None
        """by which factor, if it was"""
        self.at_once = False
        """whether it is to be weighed as soon as it has arrived"""
        self.tensor: torch.Tensor | None = None
        self.version = 0
        self.sent: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Of the whole tensor, in bytes."""
        return self.parameter.numel() * self.parameter.element_size()

    def note(self, tensor: torch.Tensor) -> None:
        """Remember what has arrived: nobody else is to touch it."""
        self.tensor = tensor
        self.version = tensor._version

    @property
    def changed(self) -> bool:
        """Whether it is not what had arrived."""
        present = self.parameter.grad
        return present is None or present is not self.tensor or present._version != self.version

    def dense(self, nothing: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """As a whole tensor of its own, which may be changed; ``nothing`` of the parameter where none arose.

        It lies in memory as the parameter does: fused optimizers walk through both in the order of their addresses.
        """
        parameter = self.parameter
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = nothing(parameter)
        elif gradient.layout is not torch.strided:
            gradient = parameter.grad = torch.empty_like(parameter).copy_(gradient.to_dense())
        elif not (gradient.is_contiguous() if parameter.is_contiguous() else gradient.stride() == parameter.stride()):
            gradient = parameter.grad = torch.empty_like(parameter).copy_(gradient)
        elif shares_memory(gradient):
            gradient = parameter.grad = gradient.clone()
        return gradient

    def forget(self) -> None:
        """It never was."""
        self.arrived = False
        self.weighed = None
        self.tensor = None


class Bucket:
    """Gradients that leave together."""

    __slots__ = ("averaged", "handle", "members", "name", "waits_for")

    def __init__(self, name: str, members: list[Gradient]) -> None:
        self.name = name
        self.members = members
        self.averaged = False
        """whether Horovod may divide the sum by the number of ranks"""
        self.waits_for = len(members)
        self.handle: Any = None
        """of the collective under way: Horovod's number, a ``Gather`` or a ``Compressed``"""
        for member in members:
            member.bucket = self

    @property
    def dtype(self) -> torch.dtype:
        """Of all of its gradients."""
        return self.members[0].parameter.dtype

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(member.size for member in self.members)

    @property
    def summed(self) -> bool:
        """Whether the sums are there, so that nobody need wait for them."""
        return type(self.handle) is int and hvd.poll(self.handle)


def buckets_of(gradients: Iterable[Gradient], by_rows: Callable[[torch.Tensor], bool]) -> list[list[Gradient]]:
    """Divide them, given in the order in which they are likely to arise. Each that travels ``by_rows`` is alone."""
    gradients = list(gradients)
    sizes, kinds = [], []
    for gradient in gradients:
        parameter = gradient.parameter
        rows = by_rows(parameter)
        gradient.at_once = gradient.size >= _WEIGHED_AT_ONCE and not rows
        sizes.append(gradient.size)
        kinds.append((parameter.dtype, parameter.device, id(parameter) if rows else 0))
    return [[gradients[number] for number in bucket] for bucket in divide(sizes, kinds)]


def flat(gradient: torch.Tensor) -> torch.Tensor:
    """A dense gradient in the order of its addresses, which is all that Horovod sums."""
    return gradient if gradient.is_contiguous() else gradient.as_strided((gradient.numel(),), (1,))


def weigh(gradients: list[torch.Tensor], weight: float) -> None:
    """Multiply them by the weight of this rank, in place."""
    if weight == 0.0:
        torch._foreach_zero_(gradients)  # and not a product, which would keep the NaN of a mean over no samples
    elif weight != 1.0:
        torch._foreach_mul_(gradients, weight)
