"""Self-adaptive allocation (Chao et al., "Task allocation for decentralized training", section III.B, Algorithm 1).

n workers; in epoch k worker i computes w_i samples (or micro-batches) per aggregation and needs t_i seconds for them.
Its speed is w_i / t_i, and equal computing times (Eq. 8) under a constant sum C = sum_i w_i (Eq. 4) give Eq. 10::

    w_i <- C (w_i / t_i) / sum_j (w_j / t_j)

If speeds do not depend on w, one epoch reaches the fixed point. It is repeated because they do depend on w, a little,
and because measurements are noisy. Algorithm 1 stops "when the ratio is not fluctuating": `settled`.

Differences from the paper: it rounds the change u_i of each worker (section III.B.3) and does not say how the sum
survives. Here the largest remainder keeps it (`proportional`). A worker without a usable time keeps its count. The stop
rule is made precise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from hvd_hetero import checks
from hvd_hetero.allocation.largest_remainder import proportional
from hvd_hetero.checks import IntArray


def adapt(counts: ArrayLike, compute_seconds: ArrayLike) -> IntArray:
    """Return the counts of the next epoch by Eq. 10: integers >= 1 with the sum of `counts`.

    A worker whose seconds are NaN, infinite, zero or negative was not measured. It keeps its count, and the others
    divide theirs.

    ``compute_seconds`` are without waiting and without the aggregation.
    """
    seconds = checks.floats("compute_seconds", compute_seconds)
    w = checks.integers("counts", counts, seconds.size)
    if w.min() < 1:
        rank = int(w.argmin())
        raise ValueError(
            f"counts[{rank}] must be at least 1, got {w[rank]}; Eq. 10 knows a worker's speed by its own work only, "
            f"so give this rank 1, or leave it out"
        )
    total = sum(w.tolist())  # Python integers: a sum of int64 could overflow
    if total >= 2**63:
        raise ValueError(f"counts must sum to less than 2**63, got a sum of {total}; count in larger units")
    measured = (seconds > 0) & np.isfinite(seconds)
    if measured.any():
        # Relative to the longest and bounded, so that no speed overflows; `proportional` could not see the difference.
        relative = np.maximum(seconds[measured] / seconds[measured].max(), 2.0**-100)
        speeds = w[measured] / relative
        # At least 1 each: without samples a worker could not be measured, and would stay at 0 by Eq. 10. Ranks get the
        # same bits, because every machine rounds the divisions above correctly.
        w[measured] = proportional(speeds, sum(w[measured].tolist()))
    return w


def settled(history: Sequence[ArrayLike], window: SupportsIndex = 3, tolerance: SupportsIndex = 1) -> bool:
    """Return True if "the ratio is not fluctuating" (Algorithm 1, line 9), so that the allocation may stay.

    It is True once no worker's count spans more than `tolerance` units over the last `window` allocations.
    ``history`` holds the allocations so far, oldest first, each with one count per worker.
    """
    # A window of 3 is arbitrary: with it the rule stops after 4 to 5 epochs, as the paper's runs did. A tolerance of 0
    # is the paper's "until w_i stays still"; 1 forgives a unit that noise moves back and forth across a rounding edge.
    length = checks.integer("window", window, least=2)
    most = checks.integer("tolerance", tolerance, least=0)
    if len(history) < length:
        return False
    workers = np.size(history[-1])
    # The range over the whole window, not from one epoch to the next: a slow drift in one direction is a change.
    last = np.stack([checks.integers("history", counts, workers) for counts in list(history)[-length:]])
    return bool(np.ptp(last, axis=0).max() <= most)
