"""Bounds of described figures: far above any real job, so that no sum of times loses the small ones."""

MOST_WORKERS = 10_000
"""A mixture of predictors takes tens of kilobytes for each worker."""

MOST_ROUNDS = 10**6
"""Rounds of one scheme, at 30 to 130 microseconds a worker (``benchmarks/papers/scale.py``)."""

MOST_SAMPLES = 5 * 10**7
"""Samples of an epoch, whose order is held as eight bytes each. Without ``dataset`` there is no order."""

LONGEST_S = 1e6
"""Twelve days, for any event within a round."""

MOST_SPEED = 1e12
"""Samples per second; its inverse is the slowest."""

MOST_RATIO = 1e6
"""The most by which a worker may be slower or faster than itself; its inverse is the smallest share."""
