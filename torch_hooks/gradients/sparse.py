"""Gradients that name the rows they touch, as embeddings with ``sparse=True`` make them, on their way to all ranks.

A sparse gradient of rank i is a list of pairs (k, v): row k, and what to add there. With the ranks' weights w_i, the
mean gradient of the round is the sum of all ``w_i v`` per row, so the lists are weighted, laid end to end (an allgather
of the indices and one of the values; ranks may have lists of any length, also none), and added up per row. The sum of a
row is taken in the same order on every rank, so all ranks hold the same bits.

**The layout of a parameter** is agreed in the first round in which it is trained, by one collective, and stays.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvd_hetero.errors import HeteroError
from torch_hooks.wires.choice import TorchWire

_SAMPLE = 2**12  # numbers of a gradient, at most, in some_numbers(): some microseconds (arbitrary)


class Layouts:
    """The layout of each parameter's gradient: how many dimensions its indices name; 0 if it is dense."""

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        prefix: str,
        optimizer: torch.optim.Optimizer,
        wire: TorchWire,
        *,
        as_dense: bool = False,
    ) -> None:
        self._names = names
        self._prefix = prefix
        self._optimizer = optimizer
        self._wire = wire
        self._as_dense = as_dense
        self._known: dict[torch.Tensor, int] = {}
        self._elsewhere: set[torch.Tensor] = set()
        self._open: dict[torch.Tensor, None] = {}  # in the order that all ranks share
        self.extend(names)
        self._back_to_rows = as_dense and isinstance(optimizer, torch.optim.SparseAdam)

    def extend(self, parameters: Iterable[torch.Tensor]) -> None:
        """Agree on the layouts of these parameters, too, when they are trained."""
        for parameter in parameters:
            self._open[parameter] = None
            if self._as_dense:
                self._known[parameter] = 0
            # It takes nothing but sparse gradients, so no rank need have seen one.
            elif isinstance(self._optimizer, torch.optim.SparseAdam):
                self._known[parameter] = 1

    def known_rows(self, parameter: torch.Tensor) -> bool:
        """Return whether gradients of this parameter travel as rows."""
        return self._known.get(parameter, 0) > 0

    def off_the_cpu(self, parameter: torch.Tensor) -> bool:
        """Return whether any rank has this parameter in another memory than the CPU's, as far as ranks have shown."""
        return parameter in self._elsewhere or parameter.device.type != "cpu"

    def rows(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient in the sparse layout agreed for this parameter, each row once."""
        if gradient.layout is torch.strided:
            # The agreed layout stays; converting changes nothing but the cost.
            gradient = gradient.to_sparse(self._known[parameter])
        return gradient.coalesce()

    def agree(self) -> None:
        """Agree on layouts and memory of parameters trained for the first time; a collective call, alike everywhere."""
        asked = [p for p in self._open if p.requires_grad]
        if not asked:
            return
        # A rank without a gradient cannot know whether to send an empty list or zeros. Only those that have one know.
        seen = [self._known.get(p, None if p.grad is None else _row_dimensions(p.grad)) for p in asked]
        mine = list(zip(seen, (p.device.type != "cpu" for p in asked), strict=True))
        everywhere = self._wire.allgather_object(mine, f"{self._prefix}.layouts")
        for parameter, *shown in zip(asked, *everywhere, strict=True):
            layouts = {layout for layout, _ in shown if layout is not None}
            if len(layouts) > 1:
                raise HeteroError(
                    f"the gradient of {self._names[parameter]!r} is sparse on one rank and dense on another. Use "
                    "the parameter in the same way on all ranks, or DistributedOptimizer(…, sparse_as_dense=True)"
                )
            self._known[parameter] = layouts.pop() if layouts else 0
            del self._open[parameter]
            # All ranks must choose the same bucket for the table, though one of them has the parameter on a GPU.
            if any(off_the_cpu for _, off_the_cpu in shown):
                self._elsewhere.add(parameter)

    def back_to_rows(self) -> None:
        """Give an optimizer that takes only rows the rows that are not zero, once the sums are here."""
        if self._back_to_rows:
            for parameter in self._names:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to_sparse(1)

    def empty_rows(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a gradient without rows, for a rank that has no gradient of this parameter."""
        return _no_rows(parameter, self._known[parameter])


def stored(gradient: torch.Tensor) -> torch.Tensor:
    """Return the numbers that a gradient stores; of a sparse one, a row that is listed twice is there twice."""
    return gradient._values() if gradient.is_sparse else gradient


def some_numbers(gradient: torch.Tensor) -> torch.Tensor:
    """Return some of the numbers that a gradient stores, spread over all of it: looking at all would cost a pass."""
    numbers = stored(gradient).detach().reshape(-1)
    return numbers[:: len(numbers) // _SAMPLE + 1]


def empty_gradient(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return zeros that the optimizer accepts for a parameter whose gradient stays on this rank."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return _no_rows(parameter, 1)
    return torch.zeros_like(parameter)


def _row_dimensions(gradient: torch.Tensor) -> int:
    return 0 if gradient.layout is torch.strided else gradient.sparse_dim()


def _no_rows(like: torch.Tensor, dimensions: int) -> torch.Tensor:
    indices = torch.zeros((dimensions, 0), dtype=torch.int64, device=like.device)
    values = torch.zeros((0, *like.shape[dimensions:]), dtype=like.dtype, device=like.device)
    return torch.sparse_coo_tensor(indices, values, like.shape, is_coalesced=True, check_invariants=False)
