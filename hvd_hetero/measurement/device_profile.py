"""One device's Gamma, learned while it trains: measure, fit once there is enough, then follow what drifts.

A batch of a new size pays for buffers, kernels and their tuning that the next one of that size does not: the first
time of a size in a row is left out. The rest of the first turn of sizes is fitted (``allocation.fit_gamma``). Later
measurements (x, t) show how much the device has slowed down since: with the last three ratios ρ = t / Γ(x),

    c <- c + a (median(ρ_r, ρ_r-1, ρ_r-2) - c),    a = 0.2,

and the allocation gets c Γ: the shape of the curve stays, its height follows. One outlier in three changes
nothing; a lasting change is followed to nine tenths after 12 rounds. A fit of the shape needs measurements over a wide
range of batches, which training does not give while the split stays; but a batch beyond that range is added to
it, as (x, t / c), and the curve is fitted again: the line's extrapolation is now replaced by a measurement.

Differences from the paper (LB-BSP section 3.3): it profiles offline, once; and nothing follows a drift there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

from hvd_hetero.allocation.gamma import Gamma, fit_gamma

_FOLLOW = 0.2  # as the EMA that LB-BSP predicts communication with
_RATIOS = 3


class DeviceProfile:
    """Measurements of one device, and the curve through them. ``enough`` sizes in a row make a first fit."""

    def __init__(self, enough: int) -> None:
        self.enough = enough
        self._size = 0
        self._measured: list[tuple[int, float]] = []
        self._fitted: Gamma | None = None
        self._height = 1.0
        self._ratios = deque([1.0] * _RATIOS, maxlen=_RATIOS)

    def observe(self, batch: int, seconds: float) -> None:
        """Add the time of a batch."""
        if not (batch >= 1 and 0 < seconds < math.inf):
            return
        familiar, self._size = batch == self._size, batch
        if not familiar:
            return
        if self._fitted is None:
            self._measured.append((batch, seconds))
            if 1 + sum(a != b for (a, _), (b, _) in pairwise(self._measured)) >= self.enough and not self._fit():
                self._measured.clear()  # no curve explains them: measure again
            return
        sizes = [size for size, _ in self._measured]
        if not min(sizes) <= batch <= max(sizes):
            self._measured.append((batch, seconds / self._height))
            self._fit()
            return
        self._ratios.append(seconds / self._fitted.seconds(batch))
        self._height += _FOLLOW * (median(self._ratios) - self._height)

    def _fit(self) -> bool:
        try:
            self._fitted = fit_gamma([batch for batch, _ in self._measured], [s for _, s in self._measured])
        except ValueError:
            return False
        return True

    @property
    def gamma(self) -> Gamma | None:
        """The curve as of now, or None if it is not known yet."""
        fitted, height = self._fitted, self._height
        if fitted is None:
            return None
        return replace(fitted, slope_s=fitted.slope_s * height, intercept_s=fitted.intercept_s * height)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        fitted = self._fitted
        return {
            "measured": [list(pair) for pair in self._measured],
            "fitted": None if fitted is None else [fitted.slope_s, fitted.intercept_s, fitted.saturation],
            "height": self._height,
            "ratios": list(self._ratios),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where it left off; the first batch in the new process pays for its buffers again."""
        self._measured = [(int(batch), float(seconds)) for batch, seconds in state["measured"]]
        fitted = state["fitted"]
        self._fitted = None
        if fitted is not None:
            slope_s, intercept_s, saturation = map(float, fitted)
            self._fitted = Gamma(slope_s, intercept_s, saturation, None)
        self._height = float(state["height"])
        self._ratios = deque((float(ratio) for ratio in state["ratios"]), maxlen=_RATIOS)
        self._size = 0
