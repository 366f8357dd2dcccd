"""Figures of an evaluation in which every rank did a part, averaged so that samples weigh alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from hvd_hetero.averages import Numbers, averages
from torch_hooks.load_balance import LoadBalance
from torch_hooks.wires.choice import wire_here

Values = TypeVar("Values", float, torch.Tensor, Mapping[str, float | torch.Tensor])


def average_by_samples(values: Values, samples: float, balance: LoadBalance | None = None) -> Values:
    """Return ``sum_i n_i v_i / sum_i n_i`` over the ranks, with rank i's means v_i over its n_i samples.

    One collective, so call it on every rank, with values of the same names and shapes; a rank without samples gives
    ``samples=0``, and whatever values (a mean over nothing is NaN, and stays out). The result has the form that was
    given, and the same bits on every rank.

    For means over something else, such as tokens, ``samples`` is the number of these.

    The sum travels by the wire of a ``LoadBalance`` without ``wire``. Give the ``balance`` of a training that
    has another one (``LoadBalance(wire=…)``).

    To let each rank evaluate its own part of a dataset, each sample once::

        part = torch.utils.data.Subset(test, range(hvd.rank(), len(test), hvd.size()))
    """
    wire = wire_here() if balance is None else balance._session.wire

    def add_up(sums: Numbers) -> Numbers:
        found: Numbers = wire.result(wire.start_sum(torch.from_numpy(sums), "hetero.average_by_samples")).cpu().numpy()
        return found

    named = values if isinstance(values, Mapping) else {"": values}
    plain = {k: v.detach().cpu().double() if isinstance(v, torch.Tensor) else float(v) for k, v in named.items()}
    means = averages(plain, samples, add_up, wire.size)
    found = {name: _like(value, means[name]) for name, value in named.items()}
    return found if isinstance(values, Mapping) else found[""]  # type: ignore[return-value]


def _like(value: float | torch.Tensor, average: Any) -> float | torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return float(average)
    dtype = value.dtype if value.is_floating_point() else torch.float64
    return torch.tensor(average, dtype=dtype, device=value.device)
