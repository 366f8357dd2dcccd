"""The small network inside NARX, and how it is fitted. No state, no threads: arrays in, arrays out.

Legend: W rows (rounds) of the window, I = 6 inputs, H = 2 hidden units, P = H (I + 2) + 1 = 17 parameters (lb-bsp
section 3.2.1 asks for one hidden layer and fewer than 20).

    f(u; θ) = β + Σ_h ω_h tanh(b_h + Σ_i A_hi u_i),        θ = (A row by row, b, ω, β)

Fitted by Levenberg-Marquardt on the mean squared error relative to the variance of the targets, held near the start
θ0:

    L(θ) = 1/W Σ_w (f(u_w; θ) - y_w)² / var(y)  +  ρ/W |θ - θ0|²

One step solves ``(JᵀJ + ρ I + μ diag(JᵀJ)) δ = -Jᵀe - ρ(θ - θ0)`` (with e and J divided by the deviation of y), takes
it if L falls (then μ/3), else stays (then 4μ). Stops when L has fallen by less than 1e-4 for 4 steps in a row
(section 4.2; a step that was not taken falls by 0), or after ``max_steps``. O(W P² + P³) per step, well under a
millisecond at W = 500.

Differences from the paper: Keras and (presumably) a gradient method there; with 17 parameters second-order steps need
tens of steps rather than thousands, so that training costs milliseconds and numpy is enough. The pull ρ towards the
start is ours: a warm start is then a prior that data overrules, not just a first guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

INPUTS = 6
HIDDEN = 2
PARAMETERS = HIDDEN * (INPUTS + 2) + 1
EARLY_STOP_FALL, EARLY_STOP_STEPS = 1e-4, 4  # lb-bsp section 4.2


@dataclass(frozen=True, slots=True)
class Fit:
    """What a fit came to: the best parameters met, their loss L, and why it stopped ("early", "steps", "singular")."""

    parameters: tuple[float, ...]
    loss: float
    steps: int
    stopped: str


def start(seed: int) -> tuple[float, ...]:
    """Small random parameters; 0.3 is arbitrary, small enough that the hidden units begin near their linear part."""
    return tuple(float(x) for x in np.random.default_rng(seed).normal(0.0, 0.3, PARAMETERS))


def forward(parameters: Sequence[float], inputs: Sequence[float]) -> float:
    """``f(u; θ)`` for one round, in plain floats: for one row numpy would mostly be busy calling itself."""
    a, b, w = parameters[: HIDDEN * INPUTS], parameters[HIDDEN * INPUTS :], parameters[HIDDEN * (INPUTS + 1) :]
    out = w[HIDDEN]
    for h in range(HIDDEN):
        out += w[h] * math.tanh(b[h] + sum(map(float.__mul__, a[h * INPUTS : (h + 1) * INPUTS], inputs)))
    return out


def forward_rows(parameters: Floats, inputs: Floats) -> tuple[Floats, Floats]:
    """``f`` for W rounds at once: values (W,) and their derivatives by the parameters (W, P)."""
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
    rest: Callable[[], None] = lambda: None,
) -> Fit:
    """Minimise L from ``initial``, which is θ0 too, with ρ = ``pull``; calls ``rest`` between steps, to give way."""
    anchor = np.asarray(initial, dtype=np.float64)
    rows = len(targets)
    scale = max(float(np.std(targets)), 1e-6)  # a speed that is constant to one in a million has nothing to learn

    def look(theta: Floats) -> tuple[float, Floats, Floats]:
        values, slopes = forward_rows(theta, inputs)
        errors = (values - targets) / scale
        return float(errors @ errors + pull * np.sum((theta - anchor) ** 2)) / rows, errors, slopes / scale

    theta, damping, idle = anchor.copy(), 1e-2, 0
    loss, errors, slopes = look(theta)
    for step in range(1, max_steps + 1):
        normal = slopes.T @ slopes + pull * np.eye(PARAMETERS)
        try:
            move = np.linalg.solve(
                normal + damping * np.diag(np.diag(normal) + 1e-12), slopes.T @ errors + pull * (theta - anchor)
            )
        except np.linalg.LinAlgError:
            return Fit(tuple(theta.tolist()), loss, step, "singular")
        new_loss, new_errors, new_slopes = look(theta - move)
        fall = loss - new_loss
        if fall > 0:  # false for NaN
            theta, loss, errors, slopes, damping = theta - move, new_loss, new_errors, new_slopes, damping / 3
        else:
            damping, fall = damping * 4, 0.0
        idle = idle + 1 if fall < EARLY_STOP_FALL else 0
        if idle >= EARLY_STOP_STEPS:
            return Fit(tuple(theta.tolist()), loss, step, "early")
        rest()
    return Fit(tuple(theta.tolist()), loss, max_steps, "steps")
