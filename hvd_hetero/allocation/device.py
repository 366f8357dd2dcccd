"""One device's Gamma, learned while it trains: measure, fit once there is enough, then follow what drifts.

With Γ fitted from the first measurements, later ones (x, t) tell how much the device has slowed down since,

    c <- (1 - a) c + a t / Γ(x),    a = 0.2,

and what is given to the allocation is c Γ: the shape of the curve stays, its height follows. A fit of the shape needs
measurements over a wide range of batches, which training does not give once the split has settled.

Differences from the paper (LB-BSP section 3.3): it profiles offline, once; and nothing follows a drift there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hvd_hetero.allocation.gamma import Gamma, fit_gamma

__all__ = ["DeviceProfile"]

_FOLLOW = 0.2  # as the EMA that LB-BSP predicts communication with
_ENOUGH = 14  # measurements: one turn of the ladder that LB-BSP climbs, but for the first rounds, which teach nothing


class DeviceProfile:
    """Measurements of one device, and the curve through them."""

    def __init__(self, enough: int = _ENOUGH) -> None:
        self.enough = enough
        self._measured: list[tuple[int, float]] = []
        self._fitted: Gamma | None = None
        self._height = 1.0

    def observe(self, batch: int, seconds: float) -> None:
        """A batch took this long."""
        if not (batch >= 1 and 0 < seconds < math.inf):
            return
        if self._fitted is not None:
            self._height += _FOLLOW * (seconds / self._fitted.seconds(batch) - self._height)
            return
        self._measured.append((batch, seconds))

    def fit(self) -> None:
        """Fit the curve, if there is enough to fit it to; measurements that no curve explains are given up."""
        if self._fitted is not None or len(self._measured) < self.enough:
            return
        try:
            self._fitted = fit_gamma([b for b, _ in self._measured], [s for _, s in self._measured])
        except ValueError:
            self._measured.clear()  # too noisy: measure anew
        else:
            self._height = 1.0

    @property
    def gamma(self) -> Gamma | None:
        """The curve as of now, or None where it is not known yet."""
        if self._fitted is None:
            return None
        return replace(
            self._fitted,
            slope_s=self._fitted.slope_s * self._height,
            intercept_s=self._fitted.intercept_s * self._height,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        fitted = self._fitted
        return {
            "measured": [list(pair) for pair in self._measured],
            "fitted": None if fitted is None else [fitted.slope_s, fitted.intercept_s, fitted.saturation],
            "height": self._height,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where it left off."""
        self._measured = [(int(batch), float(seconds)) for batch, seconds in state["measured"]]
        fitted = state["fitted"]
        self._fitted = None if fitted is None else Gamma(float(fitted[0]), float(fitted[1]), int(fitted[2]), None)
        self._height = float(state["height"])
