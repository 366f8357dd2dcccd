"""How large a described or recorded job may be, so that each simulation ends and fits in memory.

Each limit is far above any real job, and so low that a job within it takes minutes and a few gigabytes at most.
"""

__all__ = [
    "LONGEST_S",
    "MOST_BYTES_OF_A_DESCRIPTION",
    "MOST_BYTES_OF_SERIES",
    "MOST_LEAD",
    "MOST_MICRO_BATCHES",
    "MOST_MIXING_WORKERS",
    "MOST_NESTED",
    "MOST_PIECES",
    "MOST_RATIO",
    "MOST_ROUNDS",
    "MOST_SAMPLES",
    "MOST_SCHEMES",
    "MOST_SPEED",
    "MOST_VALUES",
    "MOST_WORKERS",
    "MOST_WORKER_ROUNDS",
]

MOST_BYTES_OF_A_DESCRIPTION = 2**18
"""A worker's table takes a hundred bytes."""

MOST_NESTED = 16
"""Names joined by dots in one key: Python's reader of TOML takes time and memory by the square of their number. The
settings nest three deep."""

MOST_BYTES_OF_SERIES = 2**28
"""The unpacked size of all CSV files of a description: a gzipped one may be a thousand times smaller."""

MOST_VALUES = 2**21
"""Values of all series together: a second each, they last for twenty-four days."""

MOST_WORKERS = 10_000
"""A mixture of predictors takes tens of kilobytes for each worker."""

MOST_PIECES = 10**7
"""Workers times the values of the longest series, which the simulation holds as a matrix of eight bytes each."""

MOST_ROUNDS = 10**6
"""Of all schemes together, at up to five milliseconds beside what each worker takes (the best split is a search)."""

MOST_WORKER_ROUNDS = 2 * 10**7
"""Workers times rounds, of all schemes together, at 30 to 130 microseconds each (``benchmarks/papers/scale.py``)."""

MOST_SAMPLES = 5 * 10**7
"""Samples of an epoch, whose order is held as eight bytes each. Without ``dataset`` there is no order."""

MOST_MICRO_BATCHES = 10**7
"""Micro-batches of one round, if each varies by itself: times eight bytes, in a few matrices."""

MOST_MIXING_WORKERS = 1000
"""Mixing weights are a matrix of workers by workers, and MATCHA's probabilities an optimisation over it."""

MOST_SCHEMES = 64
"""Lines of the table, and of the picture."""

MOST_LEAD = 1000
"""Plans are held ahead, a number for each worker."""

LONGEST_S = 1e6
"""Twelve days, for any event within a round."""

MOST_SPEED = 1e12
"""Samples per second; its inverse is the slowest. Sums of far larger and smaller times would lose the small ones."""

MOST_RATIO = 1e6
"""The most by which a worker may be slower or faster than itself; its inverse is the smallest share."""
