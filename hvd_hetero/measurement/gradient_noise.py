r"""The noise of gradients, from batches of unequal size.

n ranks have b_i > 0 samples and their mean gradient g_i; B = Σ b_i, and g = Σ b_i g_i / B is the round's gradient. G
is the mean of all N samples' gradients γ_j, and S = Σ_j |γ_j - G|² / (N - 1) their variance, over all parameters.

**One mean.** Draw without replacement, as an epoch does. Then E|γ_j - G|² = S (1 - 1/N), and two samples of a draw have
E (γ_j - G)·(γ_k - G) = -S/N, because all N of them add up to zero. A mean of m samples has m of the former terms and
m (m - 1) of the latter, over m²:

    E|g_m|² = |G|² + S (1/m - 1/N).

**Both estimators.** With this for every g_i and for g,

    E Σ b_i |g_i|² = B |G|² + S (n - B/N),       E B |g|² = B |G|² + S (1 - B/N).

The difference is (n - 1) S, whatever the b_i and N are. So these are unbiased:

    Ŝ = (Σ b_i |g_i|² - B |g|²) / (n - 1),       Ĝ² = |g|² - Ŝ (1/B - 1/N).

Ŝ is Σ b_i |g_i - g|² / (n - 1): never negative, and G adds nothing to its error. If the γ_j scatter normally and N is
large, no unbiased function of g_1 … g_n has a smaller variance than either, for both follow from a complete sufficient
statistic of them. Hence unequal batches lose nothing. Micro-batches whose gradients are seen one by one count
as ranks; in place of |g_i|², a rank reports the mean of its own by samples.

**The noise scale** φ = S / |G|² is the batch at which noise and gradient are equally large. Ŝ and Ĝ² are averaged
over rounds before they are divided, because the mean of quotients is biased. With A the sum of the squared weights of
all rounds, and v the weighted variance of Ĝ², the variance of the mean of Ĝ² is e² = v A / (1 - A). φ probably lies
between S / (|G|² + e) and S / (|G|² - e).

Differences from Cannikin (arXiv 2402.05302): it makes an estimate of each rank and weighs these by a matrix without the
covariance of different ranks' gradients. ``benchmarks/results/gradient_noise.md`` compares both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hvd_hetero.kept import Figure, Kept

# A gradient is measured in one of k rounds: one for so many of its numbers, at most so many (both arbitrary).
_NUMBERS_PER_ROUND, _LONGEST_INTERVAL = 2**17, 8
# The interval where the noise is only shown: a measurement takes two passes over the gradient.
_INTERVAL_IF_SHOWN = 64
# Relative, of sums of many squares that processors add up in other orders.
SUM_ROUNDING = 1e-3


class Noise(NamedTuple):
    """The estimates of one round."""

    variance: float
    """Ŝ."""
    square: float
    """Ĝ²; noise may make it negative."""


def noise_of(
    samples: Sequence[float],
    squares: Sequence[float],
    square: float,
    *,
    further: float = 0.0,
    epoch_samples: float = math.inf,
) -> Noise | None:
    """Return both estimates of one round; None if fewer than two batches had data, or a number is not finite.

    ``samples`` and ``squares`` are b_i and |g_i|² of all ranks, ``square`` is |g|², ``epoch_samples`` is N.
    ``further``: batches beyond one of each rank.
    """
    ranks = [(b, own) for b, own in zip(samples, squares, strict=True) if b > 0.0]
    count = len(ranks) + further
    if count < 2 or not math.isfinite(square) or not all(map(math.isfinite, (own for _, own in ranks))):
        return None
    batch = math.fsum(b for b, _ in ranks)
    # Every sum is exact and every operation correctly rounded, so all processors get the same bits.
    # |g_i|² - |g|² first: its rounding errors do not grow with the number of samples.
    variance = math.fsum(b * (own - square) for b, own in ranks) / (count - 1)
    variance = max(variance, 0.0)  # of rounding
    return Noise(variance, square - variance * (1.0 / batch - 1.0 / epoch_samples))


def rounds_per_measurement(numbers: int, *, decides: bool) -> int:
    """Return k: gradients of so many numbers are measured in one of k rounds. ``decides``: they decide the batch."""
    return min(max(numbers // _NUMBERS_PER_ROUND, 1), _LONGEST_INTERVAL) if decides else _INTERVAL_IF_SHOWN


class GradientNoise(Kept):
    """The averages of a training; the same on every rank."""

    KEPT = (
        Figure("rounds", whole=True),
        Figure("variance"),
        Figure("square", least=-math.inf),
        Figure("_squared"),
        Figure("_weights", most=1.0),
    )

    def __init__(self) -> None:
        self.rounds = 0
        """Rounds that were averaged."""
        self.variance = 0.0
        """The mean of Ŝ."""
        self.square = 0.0
        """The mean of Ĝ²."""
        self._squared = 0.0  # the mean of Ĝ⁴
        self._weights = 0.0  # A

    def learn(self, noise: Noise) -> None:
        """Add the estimates of a round, unless its squares are beyond all numbers."""
        if not math.isfinite(noise.variance) or not math.isfinite(noise.square * noise.square):
            return
        self.rounds += 1
        # The mean of the first 16 rounds, then of about the last sixteenth of the training, and of 1,000 rounds at
        # most. Where |G|² falls as 1/t², that lag makes its mean 14 % too large; with the last quarter, it would be 100
        # %. The numbers are arbitrary.
        part = 1.0 / min(self.rounds, max(16.0, self.rounds / 16.0), 1000.0)
        self.variance += part * (noise.variance - self.variance)
        self.square += part * (noise.square - self.square)
        self._squared += part * (noise.square * noise.square - self._squared)
        self._weights = (1.0 - part) * (1.0 - part) * self._weights + part * part

    @property
    def known(self) -> bool:
        """True if enough rounds were measured to bound the scale from both sides."""
        return self.rounds > 1 and self.variance > 0.0

    @property
    def scale(self) -> float:
        """The noise scale φ, in samples; NaN if it is not known, infinite if the gradient is lost in noise."""
        return self._over(self.square)

    @property
    def scale_between(self) -> tuple[float, float]:
        """The lower and the upper end of φ, one standard error of the mean of Ĝ² away; NaN if not known."""
        if not self.known:
            return math.nan, math.nan
        spread = max(self._squared - self.square * self.square, 0.0)
        error = math.sqrt(spread * self._weights / (1.0 - self._weights))
        return self._over(self.square + error), self._over(self.square - error)

    def _over(self, square: float) -> float:
        if not self.rounds or not self.variance > 0.0:
            return math.nan
        return self.variance / square if square > 0.0 else math.inf
