"""The digits, many times over: so that a batch as large as the papers' is a fraction of the data, as it is there."""

from __future__ import annotations

import numpy as np
from _problems import Data, SmallNetwork, digits


def noisy_digits(seed: int, copies: int, noise: float = 0.1) -> SmallNetwork:
    """Return the small network on ``copies`` of each digit, each with its own noise; the plain digits judge it."""
    data = digits(seed)
    rng = np.random.Generator(np.random.PCG64([seed, 5]))
    x = np.tile(data.train_x, (copies, 1))
    noisy = x + rng.normal(scale=noise, size=x.shape)
    return SmallNetwork(Data(noisy, np.tile(data.train_y, copies), data.test_x, data.test_y, 10))
