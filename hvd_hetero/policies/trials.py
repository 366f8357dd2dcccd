r"""A bandit that finds the number of micro-batches with the fastest rounds.

The candidates are K_1 < K_2 < …. Let c be the seconds that a sample took in a round, M_k their mean over rounds with
K_k, and n_k the rounds that this mean stands for. A round with K_k makes of them

    n_k <- min(n_k + 1, R),     M_k <- M_k + (min(c, 3 M_k) - M_k) / n_k,     n_j <- (1 - δ) n_j for the others

and n_k falls to m, if it is more, when another candidate takes the place of K_k. So a mean follows its last R rounds, a
strange round counts as three usual ones, and what is not used is forgotten: with n_j < 1, after 500 rounds at most,
K_j counts as never tried. Let s be the largest relative standard deviation of c with any of them, from 0.01 to 1. After
m rounds with one candidate, that K_k is used next which has the least

    M_k (1 - z s / √n_k),

the shortest time that is plausible. So what is little known is tried soon, what is surely worse is not, and the more
rounds scatter, the longer either takes. It is the rule of upper confidence bounds (Lai and Robbins, 1985), with
forgetting.

A candidate that was never tried comes first, if a neighbour of it loses less than a tenth to the best mean: 4
micro-batches may be worse than 1 where 16 are better, but what lies beyond a much worse one is not tried. (With 6 %
the search stayed at 1 on a recorded job where 4 take 6 % longer and 32 take 4 % less.) Two rounds after each change do
not count, because ranks need them to settle.

m = 6, R = 32, δ = 1 / 280, z = 0.65 and the limits are arbitrary, chosen on simulated ranks that stumble as in
``benchmarks/stumbles.py``. With z = 0.7 or 0.6, 17 simulated kinds of ranks were as fast within the error, 2 % at
most. Rejected: leaving a number when the mean of the last eight rounds of another one is half a per cent
less. Such means differ by a tenth if ranks stumble, and good numbers were left.

Every operation is correctly rounded, so equal times give equal choices on all processors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_SETTLES, _TRIAL = 2, 6  # rounds: that do not count, m
_REMEMBERED, _FORGET, _KNOWN = 32.0, 1.0 / 280.0, 1.0  # R, δ, and the rounds below which nothing is known
_OPTIMISM, _LEAST_SCATTER = 0.65, 0.01  # z, and what s is at least
_STRANGE, _FAR = 3.0, 1.1  # times a mean: what a round counts at most, and beyond what nothing is tried


@dataclass(slots=True)
class _Mean:
    """The mean and the variance of seconds a sample, and the rounds that it stands for."""

    rounds: float = 0.0
    seconds: float = 0.0
    variance: float = 0.0

    def add(self, seconds: float) -> None:
        if self.rounds < _KNOWN:
            self.rounds, self.seconds, self.variance = 1.0, seconds, 0.0
            return
        if not self.variance:  # the first round may have been the strange one
            self.seconds = min(self.seconds, _STRANGE * seconds)
        self.rounds = min(self.rounds + 1.0, _REMEMBERED)
        missed = min(seconds, _STRANGE * self.seconds) - self.seconds
        self.seconds += missed / self.rounds
        self.variance += ((1.0 - 1.0 / self.rounds) * missed * missed - self.variance) / self.rounds


@dataclass(slots=True)
class _Kept:
    """The state of a search."""

    at: int = 0
    """The candidate of the present rounds."""
    since: int = 0
    """Rounds since it was chosen, including those that do not count."""
    least: int = 0
    """The first candidate to try: lower ones make the same rounds as this one."""
    means: list[_Mean] = field(default_factory=list)


class Trials:
    """The search among ``candidates``, which increase. It begins with the first."""

    def __init__(self, candidates: Sequence[int]) -> None:
        self.candidates = tuple(candidates)
        self._kept = _Kept(means=[_Mean() for _ in self.candidates])

    @property
    def number(self) -> int:
        """The candidate for the next rounds."""
        return self.candidates[self._kept.at]

    @property
    def unsettled(self) -> bool:
        """True if the present candidate is not the best one by what is known, or was only just taken up."""
        kept, known = self._kept, self._known()
        best = min(known, key=self._seconds, default=kept.at)
        return kept.at != best or (kept.since <= _SETTLES and len(known) > 1)

    def learn(self, seconds: float) -> None:
        """Learn that a round with ``number`` took so many seconds a sample."""
        kept = self._kept
        kept.since += 1
        if kept.since <= _SETTLES:
            return
        for k, mean in enumerate(kept.means):
            if k != kept.at:
                mean.rounds *= 1.0 - _FORGET
        kept.means[kept.at].add(seconds)
        if kept.since >= _SETTLES + _TRIAL:
            chosen = self._next()
            kept.since = _SETTLES
            if chosen != kept.at:
                kept.means[kept.at].rounds = min(kept.means[kept.at].rounds, _TRIAL)
                kept.at, kept.since = chosen, 0

    def same_as(self, number: int) -> None:
        """Note that rounds with ``number`` equal rounds with this larger one, so those between need no trial."""
        kept = self._kept
        while kept.at + 1 < len(self.candidates) and self.candidates[kept.at + 1] <= number:
            kept.means[kept.at + 1], kept.means[kept.at] = kept.means[kept.at], _Mean()
            kept.at = kept.least = kept.at + 1

    def _seconds(self, k: int) -> float:
        return self._kept.means[k].seconds

    def _known(self) -> list[int]:
        """Return the candidates that enough is known about."""
        means = self._kept.means
        return [k for k in range(self._kept.least, len(means)) if means[k].rounds >= _KNOWN]

    def _next(self) -> int:
        """Return the candidate to use next."""
        least, means, known = self._kept.least, self._kept.means, self._known()
        best = min(known, key=self._seconds)
        near = {k for k in known if means[k].seconds <= _FAR * means[best].seconds}
        unknown = [k for k in range(least, len(means)) if k not in known and {k - 1, k + 1} & near]
        if unknown:
            return min(unknown, key=lambda k: abs(k - best))
        scatter = max(_LEAST_SCATTER, *(math.sqrt(means[k].variance) / means[k].seconds for k in known))
        scatter = min(scatter, 1.0)  # or hopes would be below 0, and the slowest the greatest
        return min(known, key=lambda k: means[k].seconds * (1.0 - _OPTIMISM * scatter / math.sqrt(means[k].rounds)))

    def state(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return asdict(self._kept)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load what ``state`` has returned."""
        try:
            kept = _Kept(
                **{name: int(state[name]) for name in ("at", "since", "least")},
                means=[_Mean(**{name: float(of_one[name]) for name in _FIGURES}) for of_one in state["means"]],
            )
        except (KeyError, TypeError, ValueError, OverflowError):  # of another version
            kept = _Kept(at=-1)
        figures = [getattr(mean, name) for mean in kept.means for name in _FIGURES]
        if (
            len(kept.means) != len(self.candidates)
            or not 0 <= kept.least <= kept.at < len(kept.means)
            or kept.since < 0
            or not all(0.0 <= figure < math.inf for figure in figures)
            or any(mean.rounds >= _KNOWN and not mean.seconds for mean in kept.means)
        ):
            raise ValueError(
                f"state: its trials must be among {list(self.candidates)}, with finite times and no negative counts, "
                f"got {dict(state)}; resume with the ranks, global_batch and micro_batches that saved it"
            )
        self._kept = kept


_FIGURES = ("rounds", "seconds", "variance")
