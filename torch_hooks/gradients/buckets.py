"""Gradients that travel together, as one tensor, and those that travel as rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvd_hetero.communication.wire import Handle
from hvd_hetero.errors import RoundStateError
from torch_hooks.gradients.sparse import Layouts
from torch_hooks.gradients.squares import square_of
from torch_hooks.wires.choice import TorchWire

_BUCKET_BYTES = 2**24  # at most: while one bucket is summed, the next is filled (arbitrary)
_ALONE_BYTES = 2**22  # from here on a copy into a bucket would cost more than a collective, 1 ms of Gloo's

# Not public, and without a public counterpart: how many tensors and Python objects use a storage.
_users: Callable[[int], int] = torch._C._storage_Use_Count


class Bucket:
    """Gradients of one type on one device that travel end to end, perhaps with other numbers behind them.

    They are copied, and the sums copied back. A single one, with nothing behind it, is summed where it is.
    """

    def __init__(self, name: str, parameters: list[torch.Tensor], compression: Any = None) -> None:
        self.name = name
        self.parameters = parameters
        self._compression = compression
        self._length = sum(p.numel() for p in parameters)
        self._whole = torch.empty(0)
        """The tensor that travels."""
        self._slots: list[torch.Tensor] = []
        """A view of each gradient's part, in the order of its parameter in memory; none for a single one."""
        self._under_way: Handle = None
        self._context: Any = None
        if len(parameters) > 1:
            self.carry(0)

    @property
    def size(self) -> int:
        """How many numbers all its gradients have."""
        return self._length

    def can_carry(self, dtype: torch.dtype, layouts: Layouts) -> bool:
        """Return whether the table may travel in it: its gradients are of this type on every rank, on the CPU."""
        return not any(p.dtype != dtype or _typed(p) or layouts.off_the_cpu(p) for p in self.parameters)

    def carry(self, numbers: int) -> None:
        """Make room for so many numbers behind the gradients."""
        one = self.parameters[0]
        # Kept for every round: new memory costs a page fault for each 4 KiB, which took longer than the copies.
        self._whole = torch.zeros(self._length + numbers, dtype=one.dtype, device=one.device)
        parts = torch.split(self._whole[: self._length], [p.numel() for p in self.parameters])
        self._slots = [
            part.as_strided(p.shape, _strides(p), part.storage_offset())
            for p, part in zip(self.parameters, parts, strict=True)
        ]

    @property
    def room(self) -> torch.Tensor:
        """The numbers behind the gradients: those of this rank, and later the sums."""
        return self._whole[self._length :]

    def fill(self, weight: float | None) -> torch.Tensor:
        """Multiply this rank's gradients by its weight and return them; zeros for missing ones, or without a weight."""
        if self._slots:
            if self.parameters[0].dtype != self._whole.dtype:
                raise RoundStateError(
                    f"parameters are {self.parameters[0].dtype}, and were {self._whole.dtype} in the first round, for "
                    f"which {self.name!r} was made. Convert the model before the first round"
                )
            if weight:
                torch._foreach_copy_(self._slots, [_present(p) for p in self.parameters])
        elif weight is None:
            one = self.parameters[0]
            self._whole = torch.zeros(self._length, dtype=_grad_type(one), device=one.device)
        else:
            self._whole = in_memory(_own(self.parameters[0]))
        numbers = self._whole[: self._length]
        if not weight:
            # A product would keep the NaN of a mean over no samples.
            numbers.zero_()
        elif weight != 1.0:
            numbers.mul_(weight)
        return numbers

    def square(self) -> torch.Tensor:
        """Return the squared norm of what it was filled with; after `collect`, of the sums."""
        return square_of(self._whole[: self._length])

    def send(self, wire: TorchWire) -> Handle:
        """Start the sum of what it was filled with."""
        sent = self._whole
        if self._compression is not None:
            sent, self._context = self._compression.compress(sent)
        self._under_way = wire.start_sum(sent, self.name)
        return self._under_way

    def summed(self, wire: TorchWire) -> bool:
        """Return whether the sums are there."""
        return wire.done(self._under_way)

    def collect(self, wire: TorchWire) -> None:
        """Wait for the sums."""
        sums, self._under_way = wire.result(self._under_way), None
        if self._compression is not None:
            self._whole.copy_(self._compression.decompress(sums, self._context))

    def take_apart(self, factor: float) -> None:
        """Make each sum, ``factor`` times, the gradient of its parameter."""
        if factor != 1.0:
            self._whole[: self._length].mul_(factor)
        if self._slots:
            torch._foreach_copy_([_present(p) for p in self.parameters], self._slots)
        else:
            # A single gradient was summed in its own memory, which zero_grad() should free.
            self._whole = torch.empty(0)


class SparseBucket:
    """A gradient that travels as the rows it touches: those of all ranks are laid end to end, and added up."""

    def __init__(self, name: str, parameter: torch.Tensor, layouts: Layouts, compression: Any = None) -> None:
        self.name = name
        self._parameter = parameter
        self._layouts = layouts
        self._compression = compression
        self._context: Any = None
        self._rows: torch.Tensor | None = None
        """What this rank sends, and later the sum, each row once."""
        self._handles: list[Handle] = []

    @property
    def size(self) -> int:
        """Numbers of the whole gradient."""
        return self._parameter.numel()

    def fill(self, weight: float | None) -> torch.Tensor:
        """Multiply this rank's rows by its weight and return their numbers; none if there are none, or no weight."""
        gradient = self._parameter.grad
        if gradient is None or not weight:
            # No product here either, because of NaN.
            self._rows = self._layouts.empty_rows(self._parameter)
        else:
            self._rows = self._layouts.rows(self._parameter, gradient.detach()) * weight
        return self._rows._values()

    def square(self) -> torch.Tensor:
        """Return the squared norm of what it was filled with; after `collect`, of the sums."""
        assert self._rows is not None, "it was filled"
        return square_of(self._rows)

    def send(self, wire: TorchWire) -> Handle:
        """Start to lay the rows of all ranks end to end."""
        assert self._rows is not None, "it was filled"
        indices, values = self._rows._indices().t().contiguous(), self._rows._values()
        if self._compression is not None:
            values, self._context = self._compression.compress(values)
        names = f"{self.name}.indices", f"{self.name}.values"
        self._handles = [*map(wire.start_gather, (indices, values), names)]

    def summed(self, wire: TorchWire) -> bool:
        """Return False: adding up per row is still to come."""
        return False

    def collect(self, wire: TorchWire) -> None:
        """Wait for all rows, and add them up."""
        indices, values = map(wire.result, self._handles)
        if self._compression is not None:
            values = self._compression.decompress(values, self._context)
        if values.numel():
            shape = self._parameter.shape
            self._rows = torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False).coalesce()
        else:
            # Horovod's result has no shape where no rank has sent a row.
            self._rows = self._layouts.empty_rows(self._parameter)

    def take_apart(self, factor: float) -> None:
        """Make their sum, ``factor`` times, the gradient of the parameter."""
        assert self._rows is not None, "they were collected"
        self._parameter.grad = self._rows if factor == 1.0 else self._rows * factor
        self._rows = None


def buckets_of(names: dict[torch.Tensor, str], layouts: Layouts, compression: Any) -> list[Bucket | SparseBucket]:
    """Divide parameters into buckets: the same on all ranks, which have the same parameters in the same order."""
    together: list[list[torch.Tensor]] = []
    filling: dict[object, tuple[list[torch.Tensor], int]] = {}  # by kind, with the bytes that it has room for
    rows = [SparseBucket(name, p, layouts, compression) for p, name in names.items() if layouts.known_rows(p)]
    for parameter in names:
        if layouts.known_rows(parameter):
            continue
        size = parameter.numel() * parameter.element_size()
        if size >= _ALONE_BYTES or _typed(parameter):
            together.append([parameter])
            continue
        kind = parameter.dtype, parameter.device
        members, room = filling.get(kind, ([], -1))
        if size > room:
            members, room = [], _BUCKET_BYTES
            together.append(members)
        members.append(parameter)
        filling[kind] = members, room - size
    return [*rows, *(Bucket(names[members[0]], members, compression) for members in together)]


def shares_memory(gradient: torch.Tensor) -> bool:
    """Return whether another tensor uses the gradient's memory, so that it must not be changed in place."""
    # Parts of one tensor, as torch.cat of parameters leaves them, have one version, which counts changes of all parts.
    # And of x + bias.view(1, -1) with a single sample in x, the gradient of the bias is a view of the gradient of the
    # sum, which the user may hold, or another bias. The two users of its own are the gradient and the object asked by.
    return _users(gradient.untyped_storage()._cdata) > 2


def _grad_type(parameter: torch.Tensor) -> torch.dtype | None:
    return getattr(parameter, "grad_dtype", parameter.dtype)


def _typed(parameter: torch.Tensor) -> bool:
    """Return whether a parameter's gradient may have another type than the parameter."""
    return _grad_type(parameter) != parameter.dtype


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return a parameter's strides, without gaps."""
    return torch.empty_like(parameter, device="meta").stride()


def _present(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient as a dense tensor in the parameter's order; zeros if there is none."""
    gradient = parameter.grad
    # Fused optimizers walk through both in the order of their addresses, so the strides must be the same.
    if gradient is None:
        gradient = parameter.grad = torch.zeros_like(parameter, dtype=_grad_type(parameter))
    elif gradient.layout is not torch.strided:
        gradient = parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient.to_dense())
    elif not (gradient.is_contiguous() if parameter.is_contiguous() else gradient.stride() == _strides(parameter)):
        gradient = parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient.detach())
    elif gradient.requires_grad:  # of backward(create_graph=True)
        gradient = parameter.grad = gradient.detach()
    return gradient


def _own(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient as `_present` does, in memory that nothing else uses."""
    gradient = _present(parameter)
    if shares_memory(gradient):
        gradient = parameter.grad = gradient.clone()
    return gradient


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor in the order of their addresses, without a copy unless there are gaps."""
    tensor = tensor.detach()
    if tensor.is_contiguous() or tensor.stride() != _strides(tensor):
        return tensor.reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,))
