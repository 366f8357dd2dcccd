"""Synchronisers that average parameters: with the neighbours before each update, or with all after local updates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import torch

from hvd_hetero.errors import HeteroError
from torch_hooks.gradients.buckets import shares_memory
from torch_hooks.gradients.sparse import empty_gradient
from torch_hooks.gradients.synchroniser import SynchronisedOptimizer, Synchroniser
from torch_hooks.wires.choice import TorchWire

if TYPE_CHECKING:
    from hvd_hetero.topology.mixing import Exchange, Mixing


class NeighbourAverage(Synchroniser):
    """D-PSGD and MATCHA: ``x_i <- sum_j W_ij x_j``, then the update with this rank's own gradient, ``n S_i / S`` times.

    One ``alltoall`` carries the parameters (``Mixing.exchange``).
    """

    def __init__(self, trained: SynchronisedOptimizer, mixing: Mixing) -> None:
        super().__init__(trained)
        self._mixing = mixing

    def finish(self) -> None:
        """Exchange parameters with the neighbours of this round, and sum the table over all ranks."""
        balancer = self._balancer
        partners = self._mixing.exchange(balancer.rank, balancer.rounds)
        exchanges = [
            _Exchange(self._wire, same, partners, f"{self._prefix}.{i}")
            for i, same in enumerate(_alike(list(self._names)))
        ]
        # Of the round as planned: n n_last / X. What was not done is corrected when the table is here.
        share = balancer.gradient.factor * balancer.workers
        self._post_table()
        self._await_table()
        mixed = [exchange.mixed() for exchange in exchanges]
        factor = share * balancer.agree()
        gradients = []
        for parameter in self._names:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = empty_gradient(parameter, self._optimizer)
                elif parameter.grad.layout is torch.strided and shares_memory(parameter.grad):
                    parameter.grad = parameter.grad.clone()
                gradients.append(parameter.grad)
        # A product with 0 would keep the NaN of a mean over no samples.
        if factor == 0.0:
            torch._foreach_zero_(gradients)
        elif factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        with torch.no_grad():
            for exchange, flat in zip(exchanges, mixed, strict=True):
                _unflatten_into(exchange.parameters, flat)


class LocalUpdates(Synchroniser):
    """ElasticBSP's local updates: after its last step, ``x <- sum_i (S_i / S) x_i``, for parameters and state alike."""

    updates_locally: ClassVar[bool] = True

    def finish(self) -> None:
        """Average what the local steps have made of parameters and state."""
        balancer = self._balancer
        done = balancer.samples_so_far
        weight = done / balancer.work.plan.total
        self._post_table()
        groups = _alike([*(p.data for p in self._names), *_floating_state(self._optimizer, self._names)])
        sent = []
        for i, tensors in enumerate(groups):
            flat = _flatten(tensors).mul_(weight)
            sent.append((self._wire.start_sum(flat, f"{self._prefix}.average.{i}"), flat))
        self._await_table()
        for handle, _ in sent:
            self._wire.result(handle)
        correction = balancer.agree()
        for tensors, (_, flat) in zip(groups, sent, strict=True):
            _unflatten_into(tensors, flat if correction == 1.0 else flat.mul_(correction))


def average_everywhere(
    wire: TorchWire, parameters: Iterable[torch.Tensor], prefix: str, *, counts: bool = True
) -> None:
    """Give every rank the mean of the parameters of all ranks that count, if any does; a collective call."""
    share = torch.tensor(float(counts), dtype=torch.float64, device="cpu")
    ranks = wire.result(wire.start_sum(share.clone(), f"{prefix}.mean.ranks"))
    if ranks == 0:
        return
    share /= ranks
    for i, tensors in enumerate(_alike(list(parameters))):
        flat = _flatten(tensors)
        # No product with 0: the parameters of a rank that has just joined may hold anything, also NaN.
        flat = flat * share.item() if counts else torch.zeros_like(flat)
        with torch.no_grad():
            _unflatten_into(tensors, wire.result(wire.start_sum(flat, f"{prefix}.mean.{i}")))


class _Exchange:
    """One dtype's parameters on their way to and from the neighbours."""

    def __init__(self, wire: TorchWire, parameters: list[torch.Tensor], partners: Exchange, name: str) -> None:
        self.parameters = parameters
        self._wire = wire
        self._partners = partners
        self._flat = _flatten(parameters)
        size = self._flat.numel()
        buffer = self._flat.expand(sum(partners.copies), size).flatten()
        self._handle = wire.start_exchange(buffer, [size * count for count in partners.copies], f"{name}.exchange")

    def mixed(self) -> torch.Tensor:
        """Return the weighted average of the neighbours' parameters and our own."""
        received, _ = self._wire.result(self._handle)
        result = self._flat * self._partners.own
        weights = self._partners.received
        for weight, theirs in zip(weights, received.view(len(weights), self._flat.numel()), strict=True):
            if weight:
                result.add_(theirs, alpha=weight)
        return result


def _alike(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def _flatten(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def _unflatten_into(tensors: list[torch.Tensor], flat: torch.Tensor) -> None:
    parts = torch.split(flat, [t.numel() for t in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def _floating_state(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> list[torch.Tensor]:
    """Return the tensors of the optimizer's state that can be averaged, in an order that all ranks share."""
    tensors = []
    for parameter, name in names.items():
        state = optimizer.state.get(parameter, {})
        for key in sorted(state):
            if isinstance(state[key], torch.Tensor) and state[key].is_floating_point():
                if state[key].layout is not torch.strided:
                    raise HeteroError(
                        f"the optimizer keeps a sparse {key!r} of {name!r}, which cannot be averaged over the ranks; "
                        "use momentum=0, SparseAdam, or ElasticBSP(updates='accumulate')"
                    )
                tensors.append(state[key])
    return tensors
