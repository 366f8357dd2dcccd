"""Whether a gradient is finite, at a glance."""

from __future__ import annotations

import math

import torch

__all__ = ["looks_finite"]

_MOST = 2**12  # numbers, some microseconds: NaN of a loss reaches all gradients, and all rows of each


def looks_finite(gradient: torch.Tensor) -> bool:
    """Return False if there is NaN or an infinity among some of its numbers, which are evenly spread.

    True on an accelerator, for which a look would have to wait.
    """
    if gradient.device.type != "cpu" or not gradient.is_floating_point():
        return True
    some = gradient.detach()[:: gradient.numel() // _MOST + 1]
    return math.isfinite(some.sum()) or bool(some.isfinite().all())  # a sum may overflow
