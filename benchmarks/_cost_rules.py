"""Texts of unequal length, and rules by which other programs divide them among equal ranks, to compare with."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from importlib.metadata import version

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Rule = Callable[[Ints, int], list[list[int]]]
"""From the lengths of a round's samples and a number of ranks to the samples of each rank."""

WIDTH = 64  # of the transformer whose costs are meant
MEDIAN, LONGEST = 24, 512


def log_normal(count: int, seed: int) -> Ints:
    """Return lengths whose logarithms scatter by σ = 1; as in a model's context, none is longer than ``LONGEST``."""
    drawn = MEDIAN * np.exp(np.random.default_rng(seed).normal(size=count))
    return np.clip(np.rint(drawn), 2, LONGEST).astype(np.int64)


def largest_differencing(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Return equally many samples for each rank, of nearly equal cost (Karmarkar and Karp 1982).

    A partial division has a set for each rank. At first there is one for every n samples that follow each other in
    cost, one sample a set. The two divisions whose sums spread most are joined, the largest set of one with the
    smallest of the other, until one division is left.
    """
    if len(costs) % ranks:
        raise ValueError(f"costs must be a multiple of {ranks} ranks, got {len(costs)}; choose another global batch")
    order = sorted(range(len(costs)), key=lambda sample: (costs[sample], sample))
    heap = []
    for begin in range(0, len(order), ranks):
        sets = [(costs[sample], [sample]) for sample in order[begin : begin + ranks]]
        heap.append((sets[0][0] - sets[-1][0], begin, sets))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        sets = sorted((a + b, left + right) for (a, left), (b, right) in zip(one, reversed(other), strict=True))
        heapq.heappush(heap, (sets[0][0] - sets[-1][0], number, sets))
    return [samples for _, samples in heap[0][2]]


def by_formula(lengths: Ints, ranks: int) -> list[list[int]]:
    """Divide as verl does: by 24576 L + L² at a width of 4096, so by 6 w L + L² (verl/utils/seqlen_balancing.py)."""
    return largest_differencing((6 * WIDTH * lengths + lengths**2).tolist(), ranks)


def equal_tokens(lengths: Ints, ranks: int) -> list[list[int]]:
    """Give each sample, the longest first, to the rank with the fewest tokens."""
    heap: list[tuple[int, int]] = [(0, rank) for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for sample in np.argsort(-lengths, kind="stable").tolist():
        tokens, rank = heap[0]
        parts[rank].append(sample)
        heapq.heapreplace(heap, (tokens + int(lengths[sample]), rank))
    return parts


def batch_rebalance(lengths: Ints, ranks: int) -> list[list[int]]:
    """Divide as transformers does with ``train_sampling_strategy="batch_rebalance"``: for padded batches."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    sampler = BatchRebalanceSampler(lengths.tolist(), len(lengths), ranks, grad_accum=1, shuffle=False)
    # What its iterator does for a rank; it would divide once for each, 60 ms for 2,048 texts on 64 ranks.
    return [list(parts[0]) for parts in sampler._assign(list(range(len(lengths))), lengths.tolist())]


def rules(*, padded: bool) -> dict[str, Rule]:
    """Return the rules for these batches, by name."""
    found = {"verl's formula": by_formula, "equal tokens": equal_tokens}
    if padded:
        found[f"batch_rebalance of transformers {version('transformers')}"] = batch_rebalance
    return found


def waiting(busy_s: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the share of each round (a row) that its ranks wait for the one that is busy longest."""
    busy = np.asarray(busy_s, dtype=np.float64)
    return 1.0 - busy.mean(axis=1) / busy.max(axis=1)
