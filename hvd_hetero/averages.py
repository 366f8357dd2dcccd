"""Sums and means over the samples of all ranks, from each rank's part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_hetero.errors import HeteroError

Numbers: TypeAlias = npt.NDArray[np.float64]
Part: TypeAlias = tuple[float, dict[str, Numbers]]
"""A number of samples, or of tokens, and sums over them by name."""


def joined(parts: Sequence[Part]) -> Part:
    """Return the sum of all ranks' parts, the same bits on every rank: they are added in the order of ranks.

    A part without names is left out: that rank has had nothing to do.
    """
    there = [part for part in parts if part[1]]
    shapes = [{name: np.shape(value) for name, value in sums.items()} for _, sums in there]
    if any(other != shapes[0] for other in shapes):
        raise HeteroError(
            f"the ranks average values of different names or shapes, here {[*shapes[0]]} and others; give the same on "
            "every rank"
        )
    weight = math.fsum(weight for weight, _ in there)
    if not weight:
        raise ValueError("samples is 0 on every rank, so there is nothing to average; evaluate at least one sample")
    return weight, {name: np.add.reduce([sums[name] for _, sums in there]) for name in there[0][1]}


def averages(values: Any, samples: float, gather: Callable[[Part], Sequence[Part]]) -> Any:
    """Return ``sum_i n_i v_i / sum_i n_i`` for values v_i over n_i samples of rank i, one or several by name.

    ``gather`` returns the parts of all ranks. Values over no samples stay out, NaN included. n_i may be another weight:
    the number of tokens that a value is a mean of.
    """
    samples = float(samples)
    if not 0.0 <= samples < math.inf:
        raise ValueError(
            f"samples must be finite and at least 0, got {samples}; give the number of samples, or tokens, that this "
            "rank's values are means of, 0 for none"
        )
    named = values if isinstance(values, Mapping) else {"": values}
    arrays = {name: np.asarray(value, dtype=np.float64) for name, value in named.items()}
    weight, sums = joined(
        gather((samples, {k: a * samples if samples else np.zeros(a.shape) for k, a in arrays.items()}))
    )
    means = {name: sums[name] / weight for name in named}
    return means if isinstance(values, Mapping) else means[""]
