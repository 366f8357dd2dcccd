r"""The costs of a micro-batch and of a round besides their samples, found in a recorded run of one rank.

Round k takes x_k samples in κ_k micro-batches t_k seconds:

    t_k = f_k (m x_k + b κ_k + c),        m, b, c >= 0,  f_k > 0 the rank's own ups and downs

c is paid once, besides the part that the rank has timed and that t_k leaves out. With s_k = x_k / κ_k,
y_k = log(t_k / κ_k), β = b / m and γ = c / m, two rounds in a row show β and γ, because m cancels and f mostly stays:

    e_k(β, γ) = (y_{k+1} - y_k) - log((s_{k+1} + β + γ / κ_{k+1}) / (s_k + β + γ / κ_k)) = log(f_{k+1} / f_k)

With r the median size of a micro-batch, φ = β / (r + β) its fixed share, and ψ = γ / (r + β) the cost of a round in
micro-batches, the likelihood is Student's, in which one strange pair does not outweigh two good ones:

    L(φ, ψ) = sum over pairs of (ν + 1) log(1 + e_k² / (ν τ²)),        L(φ) = min over ψ of L(φ, ψ)

for φ in {0, 0.001, …, 0.99} and ψ in {0, …, 1}. The estimate is the mean of φ with the weights w(φ) exp(-L(φ) / 2),
because the time of any other micro-batch is linear in φ. ``least`` and ``most`` bound the φ with

    L(φ) <= min L + P log(1 + t² / (P - p)),        t the 0.99 quantile of Student's with P - p degrees of freedom

for P pairs and p unknowns. Each comes with its own best ψ. Three pairs allow nearly anything, and of many the bound
comes to 5.4. τ is 1.48 medians of |y_{k+1} - y_k| over pairs of one size, or of |e_k| where that is least, if it is
more.

The caller knows which pairs may be compared. ``measurement.fixed_cost`` finds the same while training goes on, and must
act: it takes the mean of φ as soon as there is any evidence.

t holds the wait for the first micro-batch, most of which moves with the samples. The rest may come once a round, if
a loader fetches the others meanwhile, or with each of them. ``if_it_waits_once`` covers both.

Shapes: K rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Floats = NDArray[np.float64]

# Candidates of φ and of ψ.
_FIXED_PARTS = np.linspace(0.0, 0.99, 991)
_PER_ROUND = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
# ν: the fewer degrees of freedom, the less a strange pair weighs (arbitrary).
_DEGREES_OF_FREEDOM = 4.0
# A line does not fit a real step exactly, however little its times scatter (arbitrary).
_NOISE_AT_LEAST = 0.005
# A real step's line bends, so a φ up to this cannot be told from none.
_NO_FIXED_PART_BELOW = 0.05
# One or two pairs may be an accident.
_PAIRS_NEEDED = 3
_EQUAL_ROUNDS_BEFORE = 3
# One half of what a range leaves out is above it.
_CONFIDENCE = 0.99
# So many errors take 8 MiB at once.
_ERRORS_AT_ONCE = 2**20


class Fixed(NamedTuple):
    """Fixed costs, in samples that take as long."""

    micro_batch: float
    round: float = 0.0


class FixedSamples(NamedTuple):
    """The fixed costs of a rank, for the least, the likely and the most β."""

    least: Fixed
    likely: Fixed
    most: Fixed


def fixed_samples(
    samples: Floats,
    micro_batches: Floats,
    seconds: Floats,
    paired: NDArray[np.bool_],
    *,
    most_round_s: float = math.inf,
) -> FixedSamples:
    """Find β and γ from the samples, micro-batches and seconds of each round; (K,), all positive.

    ``paired[k]`` is True if rounds k and k + 1 may be compared, (K - 1,). ``most_round_s`` bounds c.
    """
    sizes = samples / micro_batches
    typical = float(np.median(sizes))
    betas = typical * _FIXED_PARTS / (1.0 - _FIXED_PARTS)
    unchanged = (np.diff(sizes) == 0) & (np.diff(micro_batches) == 0)
    each_s = np.log(seconds / micro_batches)
    # From the mean of up to four equal rounds, so that the noise of the longer series does not count.
    change_s = each_s[1:] - _recent(each_s, paired & unchanged)[:-1]
    informative = paired & ~unchanged
    # Then the cost is not identified: the estimate is 0, and anything is possible.
    if informative.sum() < _PAIRS_NEEDED:
        return FixedSamples(Fixed(0.0), Fixed(0.0), Fixed(float(betas[-1])))
    before, after = sizes[:-1][informative], sizes[1:][informative]
    once_before, once_after = 1.0 / micro_batches[:-1][informative], 1.0 / micro_batches[1:][informative]
    # Bounded by what the rank has timed: else a strange short round of few micro-batches passes for a large cost of
    # a round, and moves that of a micro-batch.
    bound = most_round_s / float(np.median(seconds / micro_batches))
    possible = [share for share in _PER_ROUND if share < bound] + ([bound] if bound <= _PER_ROUND[-1] else [])
    # If all rounds have as many micro-batches, the two costs cannot be separated, and that of a round is 0.
    per_round = np.array(possible if (once_before != once_after).any() else _PER_ROUND[:1])

    def of_each(figure: Callable[[Floats], Floats]) -> Floats:
        """Return a figure of e(φ, ψ), (φ, ψ); some at a time, so that memory holds the errors of long runs."""

        def errors(some: Floats) -> Floats:
            beta = some[:, None, None]
            gamma = per_round[:, None] * (typical + beta)
            ratio = (after + beta + gamma * once_after) / (before + beta + gamma * once_before)
            return np.asarray(change_s[informative] - np.log(ratio))

        parts = 1 + len(betas) * len(per_round) * len(before) // _ERRORS_AT_ONCE
        return np.concatenate([figure(errors(some)) for some in np.array_split(betas, parts)])

    same = np.abs(change_s[paired & unchanged])
    # As in epochs of two rounds: then equal rounds count, whatever lies between them.
    if len(same) < _PAIRS_NEEDED:
        same = np.abs(change_s[unchanged])
    scatter = float(of_each(lambda errors: np.median(np.abs(errors), axis=-1)).min())
    noise = max(1.4826 * max(scatter, float(np.median(same)) if len(same) else 0.0), _NOISE_AT_LEAST)
    free = max(len(before) - (2 if len(per_round) > 1 else 1), 1)
    tolerated = len(before) * math.log1p(float(stdtrit(free, _CONFIDENCE)) ** 2 / free)
    both = of_each(
        lambda errors: (_DEGREES_OF_FREEDOM + 1.0) * np.log1p((errors / noise) ** 2 / _DEGREES_OF_FREEDOM).sum(axis=-1)
    )
    against, best = both.min(axis=1), per_round[both.argmin(axis=1)]
    weights = np.exp(-0.5 * (against - against.min()))
    # A priori no cost is as likely as all others together; with equal weights, telemetry that shows little would mean
    # half of a micro-batch.
    weights[0] *= len(weights) - 1
    within = np.flatnonzero(against <= against.min() + tolerated)
    # One step further at either end, which is the grid's own error.
    first, last = max(within[0] - 1, 0), min(within[-1] + 1, len(betas) - 1)
    last = max(last, int(np.searchsorted(_FIXED_PARTS, _NO_FIXED_PART_BELOW)))
    likely = int(np.rint((weights / weights.sum()) @ np.arange(len(betas))))
    least, chosen, most = (Fixed(float(betas[i]), float(best[i] * (typical + betas[i]))) for i in (first, likely, last))
    return FixedSamples(least, chosen, most)


def if_it_waits_once(
    found: FixedSamples, alone: FixedSamples, samples: Floats, micro_batches: Floats, waiting: float
) -> FixedSamples:
    """Return the range that also holds the costs of a rank whose later micro-batches are fetched behind the first.

    ``found`` comes from computing and the wait for the first micro-batch, ``alone`` from computing only, and
    ``waiting`` is the share of the wait.
    """
    size, count = float(np.median(samples / micro_batches)), float(np.median(micro_batches))
    fixed = alone.least.micro_batch
    share = (1.0 - waiting) * fixed / (size + fixed)
    least = min(size * share / (1.0 - share), found.least.micro_batch)
    return found._replace(least=Fixed(least, found.least.round + count * (found.least.micro_batch - least)))


def _recent(figures: Floats, goes_on: NDArray[np.bool_]) -> Floats:
    """Return the mean of each figure and of up to ``_EQUAL_ROUNDS_BEFORE`` figures that lead to it; (K,), (K - 1,)."""
    total, count = figures.copy(), np.ones(len(figures))
    reached = np.ones(len(figures), dtype=np.bool_)
    for back in range(1, min(_EQUAL_ROUNDS_BEFORE, len(figures) - 1) + 1):
        reached[:back] = False
        reached[back:] &= goes_on[: len(figures) - back]
        total[back:] += np.where(reached[back:], figures[:-back], 0.0)
        count += reached
    return np.asarray(total / count)
