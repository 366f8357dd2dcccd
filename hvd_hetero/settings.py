"""One number for hyper-parameters, by which ranks notice that they do not update alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["settings_of"]

_SETTINGS = (("momentum", 0.7), ("weight_decay", 0.5), ("betas", 0.3))  # the weights only keep them apart
_NO_RATE = 1e-30  # a rate of 0 has no logarithm


def settings_of(groups: Iterable[Mapping[str, Any]]) -> float:
    """One number for the hyper-parameters that schedules change, so made that a change shows in it.

    Learning rates enter by their logarithms, for they are small beside the rest. Not a checksum, because ranks on
    unlike processors may compute a schedule with unlike last bits.
    """
    total = 0.0
    for group in groups:
        rate = group.get("lr")
        if rate is not None:
            total += math.log(abs(float(rate)) + _NO_RATE)
        for key, weight in _SETTINGS:
            value = group.get(key)
            if value is not None:
                total += weight * float(value[0] if isinstance(value, tuple | list) else value)
    return total
