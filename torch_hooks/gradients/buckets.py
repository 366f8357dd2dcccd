"""Gradients of one round, and the buckets in which they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from hvd_hetero.communication.bucket_sizes import Limits, divide
from hvd_hetero.errors import RoundStateError
from torch_hooks.gradients.gathered import norm_of
from torch_hooks.gradients.memory import BucketMemory, address
from torch_hooks.gradients.shared_memory import shares_memory
from torch_hooks.wires.choice import TorchWire

__all__ = ["Bucket", "Dense", "Gradient", "buckets_of", "flat"]

# Work right after a gradient was computed finds it in the processor's cache, and costs a separate call.
# At 256 KiB it gained 1 % of a step; the bound is arbitrary.
_AT_ONCE = 2**17


class Gradient:
    """One parameter's gradient in the current round, and its latest version, which shows a change."""

    __slots__ = ("arrived", "at_once", "bucket", "norm", "parameter", "sent", "slot", "tensor", "version", "weighed")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.bucket: Bucket | None = None
        self.arrived = False
        self.weighed = False
        """True: it was multiplied by this rank's weight, and lies in the memory that is sent."""
        self.at_once = False
        """True: weigh it as soon as it has arrived."""
        self.slot: torch.Tensor | None = None
        """The memory that it is sent from, unless it is sent alone."""
        self.tensor: torch.Tensor | None = None
        self.version = 0
        self.norm: float | None = None
        """Its norm, if its value is watched, too: a write through ``.data`` raises no version."""
        self.sent: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Bytes of the whole tensor."""
        return self.parameter.numel() * self.parameter.element_size()

    def note(self, tensor: torch.Tensor, *, by_value: bool = False) -> None:
        """Remember what has arrived: the user must not change it."""
        self.tensor = tensor
        self.version = tensor._version
        self.norm = norm_of(tensor) if by_value else None

    @property
    def changed(self) -> bool:
        """True if it is not what had arrived."""
        present = self.parameter.grad
        if present is None or present is not self.tensor or present._version != self.version:
            return True
        return self.norm is not None and self.norm == self.norm != norm_of(present)

    def dense(self) -> torch.Tensor:
        """Return it as a separate whole tensor, which may be changed; zeros if none arose.

        It lies in memory as the parameter does: fused optimizers walk through both in the order of their addresses.
        """
        parameter = self.parameter
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None))
        elif gradient.layout is not torch.strided:
            gradient = parameter.grad = torch.empty_like(parameter).copy_(gradient.to_dense())
        elif not (gradient.is_contiguous() if parameter.is_contiguous() else gradient.stride() == parameter.stride()):
            gradient = parameter.grad = torch.empty_like(parameter).copy_(gradient)
        elif shares_memory(gradient):
            gradient = parameter.grad = gradient.clone()
        return gradient

    def forget(self) -> None:
        """Forget the gradient, as if it never was."""
        self.arrived = self.weighed = False
        self.tensor = self.sent = None


class UnderWay(Protocol):
    """The gradients of a bucket on their way."""

    @property
    def done(self) -> bool:
        """True if the sums are there, as far as that is known."""

    def finish(self) -> None:
        """Wait for the sums, which become the gradients."""


class Dense:
    """One tensor of all gradients of a bucket on its way."""

    __slots__ = ("_wire", "handle")

    def __init__(self, wire: TorchWire, tensor: torch.Tensor, name: str) -> None:
        self._wire = wire
        self.handle = wire.start_sum(tensor, name)

    @property
    def done(self) -> bool:
        """True if the sums are there."""
        return self._wire.done(self.handle)

    def finish(self) -> None:
        """Wait for the sums, which replace what was sent."""
        self._wire.result(self.handle)


class Bucket:
    """Gradients that leave together: from slots next to each other, unless there is only one."""

    __slots__ = ("_address", "_memory", "_room", "members", "name", "opened", "parameters", "under_way", "waits_for")

    def __init__(self, name: str, members: list[Gradient]) -> None:
        self.name = name
        self.members = members
        self.parameters = [member.parameter for member in members]
        self._room = 0
        self.waits_for = len(members)
        self.under_way: UnderWay | None = None
        self._address: int | None = None
        """The address of a gradient that was sent alone."""
        for member in members:
            member.bucket = self
        self.release()

    @property
    def dtype(self) -> torch.dtype:
        """Type of all its gradients."""
        return self.members[0].parameter.dtype

    @property
    def size(self) -> int:
        """Bytes of all its gradients."""
        return sum(member.size for member in self.members)

    def carry(self, numbers: int) -> None:
        """Make room for so many numbers that travel along, from now on; before anything is in its slot."""
        self._room = numbers
        self.release()

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first address of its slots, and the first one behind them; nothing if it has none."""
        return () if self._memory is None else self._memory.bounds

    @property
    def room(self) -> torch.Tensor:
        """The memory of these numbers, once the bucket is open."""
        assert self._memory is not None, "a bucket that carries something has slots"
        return self._memory.room

    def nothing(self) -> torch.Tensor:
        """Return zeros instead of all that would travel, in separate memory."""
        self.open()
        assert self._memory is not None, "a bucket that carries something has slots"
        return torch.zeros_like(self._memory.whole)

    @property
    def summed(self) -> bool:
        """True if the sums are there."""
        return self.under_way is not None and self.under_way.done

    def forget(self) -> None:
        """Forget all of its gradients."""
        self.waits_for = len(self.members)
        self.opened, self._address = False, None
        for member in self.members:  # hundreds in every round, so without a call for each
            member.arrived = member.weighed = False
            member.tensor = member.sent = None

    def release(self) -> None:
        """Let go of its slots; parameters and the wire keep what has left."""
        self._memory: BucketMemory | None = None
        self.opened = False
        for member in self.members:
            member.slot = None

    def open(self) -> None:
        """Make a slot for each gradient, before the first is touched."""
        if self.opened:
            return
        if (self._room or len(self.members) > 1) and not (self._memory and self._memory.fits(self.parameters)):
            self.release()
            if len({(p.dtype, p.device) for p in self.parameters}) > 1:
                raise RoundStateError(
                    f"parameters of {self.name!r}, whose gradients travel together, have different types or lie on "
                    "different devices, which was not so when their buckets were formed; convert the model before the "
                    "first round, or all of it"
                )
            self._memory = BucketMemory(self.parameters, self._room)
            for member, slot in zip(self.members, self._memory.slots, strict=True):
                member.slot = slot
        self.opened = True

    def take(self, member: Gradient, weight: float) -> torch.Tensor:
        """Put a gradient that is here into its slot, weighed, and return it; the user must not change it any more."""
        if member.slot is None:
            taken = member.dense()
            if not member.weighed:
                _weigh([taken], weight)
        else:
            taken = member.slot
            assert member.parameter.grad is not None, "it is here"
            gradient = _whole(member.parameter.grad)
            if member.weighed:
                taken.copy_(gradient)
            elif gradient is taken or weight == 0.0:
                _weigh([taken], weight)
            else:
                torch.mul(gradient, weight, out=taken)
            member.parameter.grad = taken
        member.weighed = True
        return taken

    def fill(self, weight: float) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Weigh all gradients that are not weighed, zeros if none arose; return them, and all in one tensor."""
        self.open()
        if self._memory is None:
            alone = self.members[0].dense()
            if not self.members[0].weighed:
                _weigh([alone], weight)
                self.members[0].weighed = True
            self._address = alone.data_ptr()
            return [alone], flat(alone).detach()  # which keeps the memory, whatever becomes of the gradient
        light: list[torch.Tensor] = []
        to: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for member in self.members:
            if not member.weighed:
                gradient, slot = member.parameter.grad, member.slot
                assert slot is not None, "the bucket is open"
                light.append(slot)
                if gradient is None:
                    slot.zero_()
                elif gradient is not slot:
                    to.append(slot)
                    gradients.append(_whole(gradient))
                member.parameter.grad = slot
                member.weighed = True
        if to:
            torch._foreach_copy_(to, gradients)
        if light:
            _weigh(light if len(light) < len(self.members) else [self._memory.whole], weight)
        return self._memory.slots, self._memory.whole

    def moved(self) -> list[Gradient]:
        """Return the gradients that lie elsewhere than when they were put in their slots, or left alone."""
        if self._memory is not None:
            return [self.members[number] for number in self._memory.moved()] if self.opened else []
        sent = self.members[0].sent
        return self.members if None not in (sent, self._address) and address(sent) != self._address else []


def buckets_of(
    gradients: Iterable[Gradient], by_rows: Callable[[torch.Tensor], bool], limits: Limits
) -> list[list[Gradient]]:
    """Divide gradients, in the order in which they are likely to arise; one that travels ``by_rows`` is alone."""
    gradients = list(gradients)
    sizes, kinds = [], []
    for gradient in gradients:
        parameter = gradient.parameter
        rows = by_rows(parameter)
        gradient.at_once = gradient.size >= _AT_ONCE and not rows
        sizes.append(gradient.size)
        alone = rows or getattr(parameter, "grad_dtype", parameter.dtype) != parameter.dtype
        kinds.append((parameter.dtype, parameter.device, id(parameter) if alone else 0))
    return [[gradients[number] for number in bucket] for bucket in divide(sizes, kinds, limits)]


def flat(gradient: torch.Tensor) -> torch.Tensor:
    """Return a dense gradient in the order of its addresses, which is all that Horovod sums."""
    return gradient if gradient.is_contiguous() else gradient.as_strided((gradient.numel(),), (1,))


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as plain numbers: not in rows, and not to be differentiated."""
    if gradient.requires_grad:  # of backward(create_graph=True)
        gradient = gradient.detach()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _weigh(gradients: list[torch.Tensor], weight: float) -> None:
    """Multiply gradients by the weight of this rank, in place."""
    if weight == 0.0:
        torch._foreach_zero_(gradients)  # and not a product, which would keep the NaN of a mean over no samples
    elif weight != 1.0:
        torch._foreach_mul_(gradients, weight)
