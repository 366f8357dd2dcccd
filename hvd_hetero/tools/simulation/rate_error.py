r"""By how much a recorded run's luck moves its rate.

Round k took T_k seconds, and E_k were to be expected: of its plan, at each rank's median pace. The rounds, in order,
make up to ten blocks, with u_j = (sum of T_k) / (sum of E_k) over the rounds of block j. A block holds several rounds,
so a minute in which the machine was slow counts as one event and not as many. Another run as long meets luck of its
own, so its rate differs from this one's, with 95 % of probability, by the share

    t_{J-1} √2 s / (ū √J) at most,      s² = sum_j (u_j - ū)² / (J - 1)

with t_{J-1} Student's. It says nothing of what the rounds have not met, such as a machine that is slower all day.

Shapes: K rounds, J blocks.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

__all__ = ["rate_error"]

Floats = NDArray[np.float64]

_BLOCKS = 10  # arbitrary: fewer see slower changes, and know their scatter less well
_PROBABILITY = 0.975  # of not being exceeded; both sides leave out 5 %


def rate_error(seconds: Floats, expected_s: Floats) -> float:
    """Return the share by which another run's rate may differ; ``seconds`` and ``expected_s`` of each round, (K,)."""
    blocks = min(_BLOCKS, len(seconds))
    sums = [[part.sum() for part in np.array_split(each, blocks)] for each in (seconds, expected_s)]
    if blocks < 2 or not min(sums[1]) > 0:
        return 0.0
    luck = np.array(sums[0]) / np.array(sums[1])
    share = luck.std(ddof=1) / (luck.mean() * math.sqrt(blocks)) if luck.mean() > 0 else 0.0
    return float(stdtrit(blocks - 1, _PROBABILITY) * math.sqrt(2.0) * share)
