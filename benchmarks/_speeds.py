"""Synthetic series of speeds, for judging predictors where they were not tuned.

Each kind is a function of the number of rounds and a random generator that returns logarithms of speeds. Sizes are
arbitrary, with measurement noise of 1 to 5 % as on real ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Logs = NDArray[np.float64]
Make = Callable[[int, np.random.Generator], Logs]


def white(deviation: float) -> Make:
    """Return measurement noise around a constant speed."""
    return lambda rounds, rng: rng.normal(0, deviation, rounds)


def walk(step: float, noise: float) -> Make:
    """Return a speed that drifts, measured with noise."""
    return lambda rounds, rng: rng.normal(0, step, rounds).cumsum() + rng.normal(0, noise, rounds)


def steps(per_round: float) -> Make:
    """Return levels from 0.3 to 1 that change at once, with this probability a round."""

    def make(rounds: int, rng: np.random.Generator) -> Logs:
        level, y = math.log(rng.uniform(0.3, 1.0)), np.empty(rounds)
        for t in range(rounds):
            if rng.random() < per_round:
                level = math.log(rng.uniform(0.3, 1.0))
            y[t] = level
        return y + rng.normal(0, 0.02, rounds)

    return make


def spikes(rounds: int, rng: np.random.Generator) -> Logs:
    """One round in 33 is 2 to 5 times too slow."""
    return rng.normal(0, 0.02, rounds) - np.where(rng.random(rounds) < 0.03, np.log(rng.uniform(2, 5, rounds)), 0.0)


def spells(rounds: int, rng: np.random.Generator) -> Logs:
    """Half the speed for 5 rounds on average, every 50."""
    y, slow = rng.normal(0, 0.03, rounds), False
    for t in range(rounds):
        slow = rng.random() < (0.8 if slow else 0.02)
        y[t] -= 0.7 * slow
    return y


def periodic(period: int) -> Make:
    """Return a sine of 30 %."""
    return lambda rounds, rng: (
        np.log(1 + 0.3 * np.sin(2 * np.pi * np.arange(rounds) / period)) + rng.normal(0, 0.02, rounds)
    )


def alternating(rounds: int, rng: np.random.Generator) -> Logs:
    """Fast and slow in turn."""
    return 0.1 * (-1.0) ** np.arange(rounds) + rng.normal(0, 0.02, rounds)


def heavy_tails(rounds: int, rng: np.random.Generator) -> Logs:
    """Student's t with 2 degrees of freedom, 3 %."""
    return 0.03 * np.clip(rng.standard_t(2, rounds), -100, 50)


def reverting(rounds: int, rng: np.random.Generator) -> Logs:
    """Autoregressive, 0.7."""
    y = rng.normal(0, 0.05, rounds)
    for t in range(1, rounds):
        y[t] += 0.7 * y[t - 1]
    return y


def one_burst(rounds: int, rng: np.random.Generator) -> Logs:
    """Calm, but for 8 to 25 rounds in a row anywhere between 1 and 2.5 of 2.3, sticky in every second series."""
    y = math.log(2.3) + rng.normal(0, 0.03, rounds)
    begin, length, sticky = int(rng.integers(60, rounds - 40)), int(rng.integers(8, 25)), rng.random() < 0.5
    y[begin : begin + length] = np.log(rng.uniform(1.0, 2.5, length))
    for t in range(begin + 1, begin + length):
        if sticky and rng.random() < 0.5:
            y[t] = y[t - 1] + rng.normal(0, 0.03)
    return y


def then(first: Make, second: Make, last: int) -> Make:
    """One kind, and for the last rounds the other, from where the first ended."""

    def make(rounds: int, rng: np.random.Generator) -> Logs:
        y = first(rounds - last, rng)
        return np.concatenate([y, y[-1] + second(last, rng)])

    return make


def struck(make: Make, at: int = 60) -> Make:
    """One round is a thousand times too slow."""

    def made(rounds: int, rng: np.random.Generator) -> Logs:
        y = make(rounds, rng)
        y[at] -= math.log(1000.0)
        return y

    return made
