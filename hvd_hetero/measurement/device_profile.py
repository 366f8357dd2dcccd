"""One device's Gamma, learned while it trains: measure, fit once there is enough, then follow what drifts.

A batch of a new size pays for buffers, kernels and their tuning, and the next one of that size does not. So the first
time of a size in a row is left out. The rest of the first turn of sizes is fitted (``allocation.fit_gamma``). Later
measurements (x, t) show how much the device has slowed down since: with the last three ratios ρ = t / Γ(x),

    c <- c + a (median(ρ_r, ρ_r-1, ρ_r-2) - c),    a = 0.2,

and the allocation gets c Γ: the shape of the curve stays, its height follows.

Differences from the paper (LB-BSP section 3.3): it profiles offline, once; and nothing follows a drift there.
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from hvd_hetero.allocation.gamma import Gamma, fit_gamma
from hvd_hetero.kept import Figure, Kept


class DeviceProfile(Kept):
    """Measurements of one device, and the curve through them. ``enough`` sizes in a row make a first fit."""

    KEPT = (
        Figure("_sizes", least=1.0, whole=True, any_length=True),
        Figure("_seconds", positive=True, any_length=True),
        Figure("_curve", least=-math.inf),
        Figure("_height"),
        Figure("_ratios"),
    )

    def __init__(self, enough: int) -> None:
        self.enough = enough
        self._size = 0  # of the batch before; not kept, since the first one in a new process pays for its buffers again
        self._sizes: list[int] = []
        self._seconds: list[float] = []
        self._curve = (0.0, 0.0, 0.0)  # m, b and x_s of the fit, before any drift; 0: not known
        self._height = 1.0
        # Three, so that one outlier changes nothing.
        self._ratios = [1.0] * 3

    def observe(self, batch: int, seconds: float) -> None:
        """Add the time of a batch."""
        if not (batch >= 1 and 0 < seconds < math.inf):
            return
        # The first of a size in a row pays for buffers, kernels and their tuning.
        familiar, self._size = batch == self._size, batch
        if not familiar:
            return
        if not self._curve[0]:
            self._add(batch, seconds)
            if 1 + sum(a != b for a, b in pairwise(self._sizes)) >= self.enough and not self._fit():
                self._sizes, self._seconds = [], []  # no curve explains them: measure again
        elif not min(self._sizes) <= batch <= max(self._sizes):
            # A measurement takes the place of the line's extrapolation.
            self._add(batch, seconds / self._height)
            self._fit()
        else:
            self._ratios = [*self._ratios[1:], seconds / Gamma(*self._curve, None).seconds(batch)]
            # The height alone: a fit of the shape needs a wide range of batches, which training does not give while the
            # split stays. With 0.2, as the EMA that LB-BSP predicts communication with, a lasting change is followed to
            # nine tenths after 12 rounds.
            self._height += 0.2 * (median(self._ratios) - self._height)

    def _add(self, batch: int, seconds: float) -> None:
        self._sizes.append(batch)
        self._seconds.append(seconds)

    def _fit(self) -> bool:
        try:
            fitted = fit_gamma(self._sizes, self._seconds)
        except ValueError:
            return False
        self._curve = (fitted.slope_s, fitted.intercept_s, fitted.saturation)
        return True

    @property
    def gamma(self) -> Gamma | None:
        """The curve as of now, or None if it is not known yet."""
        slope_s, intercept_s, saturation = self._curve
        return Gamma(slope_s * self._height, intercept_s * self._height, saturation, None) if slope_s else None
