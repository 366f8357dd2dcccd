"""The small network inside NARX, and how it is fitted. No state, no threads: arrays in, arrays out.

Legend: W rows (rounds) of the window, I = 4 inputs, H = 2 hidden units, P = H (I + 2) + 1 = 13 parameters (lb-bsp
section 3.2.1 asks for one hidden layer and fewer than 20).

    f(u; θ) = β + Σ_h ω_h tanh(b_h + Σ_i A_hi u_i),        θ = (A row by row, b, ω, β)

Fitted by Levenberg-Marquardt (SciPy's, which is MINPACK's) on the mean squared error relative to the variance of the
targets, held near the start θ0:

    L(θ) = 1/W Σ_w (f(u_w; θ) - y_w)² / var(y)  +  ρ/W |θ - θ0|²

until a step lowers L by less than 1e-4 of itself (section 4.2), or after ``max_steps``. O(W P² + P³) per step, well
under a millisecond at W = 500.

Differences from the paper: Keras and (presumably) a gradient method there. With 13 parameters, second-order methods
need tens of steps rather than thousands; so training costs milliseconds, and numpy is enough. The pull ρ towards the
start is ours: a warm start is then a prior that data overrules, not just a first guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

INPUTS = 4
HIDDEN = 2
PARAMETERS = HIDDEN * (INPUTS + 2) + 1


@dataclass(frozen=True, slots=True)
class FittedNetwork:
    """What a fit came to: the best parameters met, and their loss L."""

    parameters: tuple[float, ...]
    loss: float


def start(seed: int) -> tuple[float, ...]:
    """Return small random parameters; 0.3 is arbitrary, so small that hidden units begin near their linear part."""
    return tuple(float(x) for x in np.random.default_rng(seed).normal(0.0, 0.3, PARAMETERS))


def forward(parameters: Sequence[float], inputs: Sequence[float]) -> float:
    """Return ``f(u; θ)`` for one round, in plain floats: for one row numpy would cost more."""
    a, b, w = parameters[: HIDDEN * INPUTS], parameters[HIDDEN * INPUTS :], parameters[HIDDEN * (INPUTS + 1) :]
    out = w[HIDDEN]
    for h in range(HIDDEN):
        out += w[h] * math.tanh(b[h] + sum(map(float.__mul__, a[h * INPUTS : (h + 1) * INPUTS], inputs)))
    return out


def forward_rows(parameters: Floats, inputs: Floats) -> tuple[Floats, Floats]:
    """Return ``f`` for W rounds at once: values (W,) and their derivatives by the parameters (W, P)."""
    rows = len(inputs)
    a = parameters[: HIDDEN * INPUTS].reshape(HIDDEN, INPUTS)
    b, w = parameters[HIDDEN * INPUTS :][:HIDDEN], parameters[HIDDEN * (INPUTS + 1) :][:HIDDEN]
    units = np.tanh(inputs @ a.T + b)  # (W, H)
    slopes = (1.0 - units**2) * w  # (W, H)
    by_a = (slopes[:, :, None] * inputs[:, None, :]).reshape(rows, HIDDEN * INPUTS)
    return units @ w + parameters[-1], np.concatenate([by_a, slopes, units, np.ones((rows, 1))], axis=1)


def fit(
    initial: Sequence[float],
    inputs: Floats,
    targets: Floats,
    *,
    pull: float,
    max_steps: int = 100,
    give_way: Callable[[], None] = lambda: None,
) -> FittedNetwork:
    """Minimise L from ``initial``, which is θ0 too, with ρ = ``pull``; calls ``give_way`` in each step."""
    from scipy.optimize import least_squares  # takes a fifth of a second, which a job without NARX need not pay

    anchor = np.asarray(initial, dtype=np.float64)
    scale = max(float(np.std(targets)), 1e-6)  # a speed that is constant to one in a million has nothing to learn
    held = math.sqrt(pull) * np.eye(PARAMETERS)

    def residuals(theta: Floats) -> Floats:
        give_way()
        errors = (forward_rows(theta, inputs)[0] - targets) / scale
        return np.concatenate([errors, held @ (theta - anchor)])

    def slopes(theta: Floats) -> Floats:
        return np.concatenate([forward_rows(theta, inputs)[1] / scale, held])

    first = residuals(anchor)
    if not np.isfinite(first).all():
        return FittedNetwork(tuple(anchor.tolist()), math.nan)
    # ftol is the fall of the loss at which lb-bsp section 4.2 stops.
    found = least_squares(residuals, anchor, slopes, method="lm", ftol=1e-4, xtol=1e-8, gtol=1e-8, max_nfev=max_steps)
    return FittedNetwork(tuple(found.x.tolist()), 2.0 * float(found.cost) / len(targets))
