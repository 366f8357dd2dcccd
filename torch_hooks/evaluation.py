"""Figures of an evaluation that every rank did a part of, averaged so that samples weigh alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from hvd_hetero.checks import integer
from hvd_hetero.errors import HeteroError
from hvd_hetero.rounds import checksum
from torch_hooks.load_balance import LoadBalance
from torch_hooks.wires.choice import wire_here

__all__ = ["average_by_samples"]

Values = TypeVar("Values", float, torch.Tensor, Mapping[str, float | torch.Tensor])


def average_by_samples(values: Values, samples: int, balance: LoadBalance | None = None) -> Values:
    """``sum_i n_i v_i / sum_i n_i`` over the ranks, where rank i has found the means v_i over its n_i samples.

    One collective, so call it on every rank, with values of the same names and shapes; a rank without samples gives
    ``samples=0``, and whatever values (a mean over nothing is NaN, and stays out). The result has the form that was
    given, and the same bits on every rank.

    The sum travels by the wire that a ``LoadBalance`` uses which is given none. Give the ``balance`` of a training that
    has another one (``LoadBalance(wire=…)``).

    To let each rank evaluate its own part of a dataset, each sample once::

        part = torch.utils.data.Subset(test, range(hvd.rank(), len(test), hvd.size()))
    """
    samples = integer(
        "samples", samples, 0, way_out="give the number of samples that this rank has evaluated, 0 for none"
    )
    named = values if isinstance(values, Mapping) else {"": values}
    tensors = [torch.as_tensor(named[name], dtype=torch.float64, device="cpu").detach() for name in sorted(named)]
    shapes = (
        checksum(repr([(name, tuple(t.shape)) for name, t in zip(sorted(named), tensors, strict=True)]).encode())
        & 0xFFFFF
    )  # squares of 20 bits add up exactly for 8,192 ranks
    sums = (
        torch.cat([t.reshape(-1) for t in tensors]) * samples
        if samples
        else torch.zeros(sum(map(torch.numel, tensors)), device="cpu")
    )
    # Names that differ would be summed one onto the other: their checksum tells, if their number does not already.
    head = torch.tensor([samples, shapes, float(shapes) ** 2], dtype=torch.float64, device="cpu")
    wire = wire_here() if balance is None else balance._session.wire
    found = wire.result(wire.start_sum(torch.cat([head, sums.double()]), "hetero.average_by_samples"))
    total, *of_shapes = found[:3].tolist()
    if of_shapes != [shapes * wire.size, float(shapes) ** 2 * wire.size]:
        raise HeteroError(
            f"the ranks average values of different names or shapes, here {sorted(named)}; give the same on every rank"
        )
    if not total:
        raise ValueError("samples is 0 on every rank, so there is nothing to average; evaluate at least one sample")
    parts = torch.split(found[3:] / total, [t.numel() for t in tensors])
    averages = {
        name: _like(named[name], part.view(t.shape))
        for name, part, t in zip(sorted(named), parts, tensors, strict=True)
    }
    return {name: averages[name] for name in named} if isinstance(values, Mapping) else averages[""]  # type: ignore[return-value]


def _like(value: float | torch.Tensor, average: torch.Tensor) -> float | torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return float(average)
    return average.to(value.device, value.dtype if value.is_floating_point() else torch.float64)
