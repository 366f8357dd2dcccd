"""How long a round takes, and how much gets done (non-blocking-sgd, section 4, Eqs. 7 to 18).

Setting: P workers, independent and identical times X per batch of B samples, X_{k:P} the k-th smallest of the P. A
non-blocking round ends with the first worker, a synchronous one (BSP, D-PSGD, MATCHA) with the last. Where a ``rate``
is asked for, X ~ exp(rate), mean 1 / rate.

With H_n = 1 + 1/2 + ... + 1/n, and since the gaps X_{k:P} - X_{k-1:P} are independent, exp(rate (P - k + 1)),

    E[X_{k:P}] = (H_P - H_{P-k}) / rate
    E[X_{1:P}] = 1 / (rate P)                                                  Eq. 9
    E[X_{P:P}] = H_P / rate                                                    Eq. 10

Eqs. 15 to 18 speak of the times of one round; these functions take them as they are. Of their means,

    E[ B Y X_{1:P} ] = B P log(P) / (P - 1)                                    Eq. 16 (Y = sum of 1/X)
    E[ P B / X_{P:P} ] = P B rate * integral_0^1 dv / -log(1 - v^(1/P))        Eq. 17

the first since, with M = min of the others, E[min(X, M) / X] = integral of (e^-x - e^-Px) / ((P-1) x), Frullani's; the
second by the quantile v = F(x)^P of the maximum. Eqs. 15 and 18 have no mean under exponential times: 1/X has none.
What a long run shows is the quotient of means (renewal-reward): samples per round over seconds per round.

Complexity: O(1) for closed forms, O(P) where times are given, one adaptive quadrature for the rest.

Differences from the paper
- Eqs. 10 and 14 are there alternating sums of binomials over (k+1)^2. Their terms grow like 2^P, so in double
  precision four digits are left at P = 50 and none at 60. The sum equals H_P / P; so stated here, exact for any P.
- The paper calls X at times the time of a mini-batch (section 4.1), at times that of the batch (Theorem 3 on). Its
  formulas hold for the latter, which is meant here.
- Eq. 16 counts fractions of samples; real rounds do whole micro-batches.
- The means of Eqs. 16 and 17 and the long-run speed-up are added.

Shapes: P workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.integrate import quad
from scipy.special import betaincinv, digamma


def harmonic(n: int) -> float:
    """H_n = 1 + 1/2 + ... + 1/n, with H_0 = 0; O(1) by the digamma function."""
    if not n >= 0 or n != n // 1:
        raise ValueError(f"n must be a whole number, at least 0, got {n}; it is how many terms are summed")
    return float(digamma(n + 1) + np.euler_gamma) if n else 0.0


def order_statistic_exponential(k: int, workers: int, rate: float = 1.0) -> float:
    """E[X_{k:P}] for X ~ exp(rate): the mean time until k of P workers are done."""
    _check(workers=workers, rate=rate)
    _check_order(k, workers)
    return (harmonic(workers) - harmonic(workers - k)) / rate


def order_statistic(k: int, workers: int, quantile: Callable[[float], float]) -> float:
    """E[X_{k:P}] for any distribution, given by its quantile function: Eqs. 7, 8, 11 and 12 beyond the exponential.

    X_{k:P} is distributed as quantile(U) with U ~ Beta(k, P - k + 1), so its mean is the integral over v in (0, 1) of
    quantile(betaincinv(k, P - k + 1, v)).
    """
    _check(workers=workers)
    _check_order(k, workers)
    value, _ = quad(lambda v: quantile(float(betaincinv(k, workers - k + 1, v))), 0.0, 1.0, limit=500, epsrel=1e-9)
    return float(value)


def round_time_nonblocking(workers: int, rate: float = 1.0) -> float:
    """E[T] = E[X_{1:P}] = 1 / (rate P), Eqs. 7 and 9."""
    _check(workers=workers, rate=rate)
    return 1.0 / (rate * workers)  # and not as H_P - H_{P-1}, which cancels


def round_time_synchronous(workers: int, rate: float = 1.0) -> float:
    """E[T] = E[X_{P:P}] = H_P / rate, Eq. 10."""
    return order_statistic_exponential(workers, workers, rate)


def round_time_ratio(workers: int) -> float:
    """Eq. 8 under exponential times: E[X_{1:P}] / E[X_{P:P}] = 1 / (P H_P)."""
    return round_time_nonblocking(workers) / round_time_synchronous(workers)


def epoch_time_nonblocking(workers: int, dataset: float, batch: float, rate: float = 1.0) -> float:
    """D / (P B) E[X_{1:P}] = D / (rate P^2 B), Eqs. 11 and 13: D / (P B) rounds, however much each got done."""
    _check(workers=workers, dataset=dataset, batch=batch)
    return dataset / (workers * batch) * round_time_nonblocking(workers, rate)


def epoch_time_synchronous(workers: int, dataset: float, batch: float, rate: float = 1.0) -> float:
    """D / (P B) E[X_{P:P}] = D H_P / (rate P B), Eqs. 12 and 14."""
    _check(workers=workers, dataset=dataset, batch=batch)
    return dataset / (workers * batch) * round_time_synchronous(workers, rate)


def throughput_nonblocking(times_s: ArrayLike, batch: float) -> float:
    """sum_i B / X_i = B Y samples per second, Eq. 15: no worker waits."""
    return batch * float((1.0 / _times(times_s, batch)).sum())


def samples_nonblocking(times_s: ArrayLike, batch: float) -> float:
    """B Y X_{1:P}, Eq. 16: the samples done, in fractions, when the first worker has done its batch."""
    times = _times(times_s, batch)
    return batch * float((times.min() / times).sum())


def throughput_synchronous(times_s: ArrayLike, batch: float) -> float:
    """P B / X_{P:P} samples per second, Eq. 17: all wait for the last."""
    times = _times(times_s, batch)
    return len(times) * batch / float(times.max())


def throughput_ratio(times_s: ArrayLike) -> float:
    """Y X_{P:P} / P, Eq. 18: non-blocking over synchronous throughput; 1 where all times are equal, else above."""
    times = _times(times_s, 1.0)
    return float((times.max() / times).mean())


def expected_samples_nonblocking(workers: int, batch: float) -> float:
    """Return the mean of Eq. 16 under exponential times, B P log(P) / (P - 1), whatever the rate; B for one worker."""
    _check(workers=workers, batch=batch)
    return batch * (workers * math.log(workers) / (workers - 1) if workers > 1 else 1.0)


def expected_throughput_synchronous(workers: int, batch: float, rate: float = 1.0) -> float:
    """Return the mean of Eq. 17 under exponential times; infinite for one worker, as is the mean of 1/X."""
    _check(workers=workers, batch=batch, rate=rate)
    if workers == 1:
        return math.inf
    # v = w^P would put the mass at w near 1; v itself spreads it evenly. v^(1/P) by expm1 keeps 1 - v^(1/P) exact.
    value, _ = quad(lambda v: -1.0 / math.log(-math.expm1(math.log(v) / workers)), 0.0, 1.0, limit=500, epsrel=1e-9)
    return workers * batch * rate * float(value)


def long_run_speedup(workers: int) -> float:
    """Return samples per second of non-blocking over synchronous rounds in the long run.

    P H_P log(P) / (P - 1) under exponential times: (E of Eq. 16 / E[X_{1:P}]) / (P B / E[X_{P:P}]).
    """
    return expected_samples_nonblocking(workers, 1.0) / workers / round_time_ratio(workers)


def _times(times_s: ArrayLike, batch: float) -> NDArray[np.float64]:
    _check(batch=batch)
    times = np.asarray(times_s, dtype=np.float64)
    if times.ndim != 1 or times.size == 0 or not ((times > 0) & np.isfinite(times)).all():
        raise ValueError(
            f"times_s must be one positive, finite time per worker, got {times_s!r}; leave out workers without a time"
        )
    return times


def _check(**positive: float) -> None:
    for name, value in positive.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    workers = positive.get("workers", 1)
    if workers != workers // 1:
        raise ValueError(f"workers must be a whole number, got {workers}; order statistics are of so many times")


def _check_order(k: int, workers: int) -> None:
    if not 1 <= k <= workers or k != k // 1:
        raise ValueError(f"k must be whole, from 1 to workers = {workers}, got {k}; 1 is the first of them to be done")
