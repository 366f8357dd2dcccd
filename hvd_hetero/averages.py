"""Means over the samples of all ranks, from each rank's mean and number of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_hetero.errors import HeteroError
from hvd_hetero.rounds import checksum

Numbers: TypeAlias = npt.NDArray[np.float64]


def averages(values: Any, samples: float, add_up: Callable[[Numbers], Numbers], ranks: int) -> Any:
    """Return ``sum_i n_i v_i / sum_i n_i`` for values v_i over n_i samples of rank i, one or several by name.

    ``add_up`` sums over the ranks. Values over no samples stay out, NaN included. n_i may be another weight: the number
    of tokens that a value is a mean of.
    """
    samples = float(samples)
    if not 0.0 <= samples < math.inf:
        raise ValueError(
            f"samples must be finite and at least 0, got {samples}; give the number of samples, or tokens, that this "
            "rank's values are means of, 0 for none"
        )
    named = values if isinstance(values, Mapping) else {"": values}
    arrays = {name: np.asarray(named[name], dtype=np.float64) for name in sorted(named)}
    # Ranks with other names would add unrelated values. The sums of the checksum and of its square show it: both are n
    # times this rank's only if all ranks have the same. Squares of 20 bits add up exactly for 8,192 ranks.
    shapes = checksum(repr([(name, array.shape) for name, array in arrays.items()]).encode()) & 0xFFFFF
    sums = [array.ravel() * samples if samples else np.zeros(array.size) for array in arrays.values()]
    found = add_up(np.concatenate([[samples, shapes, float(shapes) ** 2], *sums]))
    if found[1:3].tolist() != [shapes * ranks, float(shapes) ** 2 * ranks]:
        raise HeteroError(
            f"the ranks average values of different names or shapes, here {list(arrays)}; give the same on every rank"
        )
    if not found[0]:
        raise ValueError("samples is 0 on every rank, so there is nothing to average; evaluate at least one sample")
    parts = np.split(found[3:] / found[0], np.cumsum([array.size for array in arrays.values()])[:-1])
    means = {name: part.reshape(arrays[name].shape)[()] for name, part in zip(arrays, parts, strict=True)}
    return {name: means[name] for name in named} if isinstance(values, Mapping) else means[""]
