r"""A bandit that finds the number of micro-batches with the fastest rounds.

The candidates are K_1 < K_2 < …. Let c be the seconds that a sample took in a round, M_k their mean over rounds with
K_k, and n_k the rounds that this mean stands for. A round with K_k makes of them

    n_k <- min(n_k + 1, R),     M_k <- M_k + (min(c, 3 M_k) - M_k) / n_k,     n_j <- (1 - δ) n_j for the others

and n_k falls to the rounds of a trial when another candidate takes the place of K_k. Let s be the largest relative
standard deviation of c with any of them. After a trial of the present one, that K_k is used next which has the least

    M_k (1 - z s / √n_k),

the shortest time that is plausible. So what is little known is tried soon, what is surely worse is not, and the more
rounds scatter, the longer either takes. It is the rule of upper confidence bounds (Lai and Robbins, 1985), with
forgetting. A candidate that was never tried comes first, if a neighbour of it is nearly as good as the best.

Every operation is correctly rounded, so equal times give equal choices on all processors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_hetero.kept import Figure, Kept

# All are arbitrary, chosen on simulated ranks that stumble as in benchmarks/stumbles.py.
# The first rounds after a change do not count, because ranks need them to settle.
_ROUNDS_LEFT_OUT, _ROUNDS_PER_TRIAL = 2, 6
# R and δ: a mean follows its last R rounds, and a candidate that was not used for 500 counts as never tried.
_ROUNDS_AVERAGED, _FORGOTTEN_PER_ROUND = 32.0, 1.0 / 280.0
# z. With 0.7 or 0.6, 17 simulated kinds of ranks were as fast within the error, 2 % at most.
_HOPE_PER_ERROR = 0.65
# Times a mean: what a round counts at most, and how near the best a neighbour must be. With 1.06 the search stayed at 1
# on a recorded job where 4 micro-batches take 6 % longer and 32 take 4 % less.
_ROUND_COUNTS_UP_TO, _NEIGHBOUR_WITHIN = 3.0, 1.1


class Trials(Kept):
    """The search among ``candidates``, which increase. It begins with the first."""

    KEPT = (
        *(Figure(name, whole=True) for name in ("_at", "_since", "_least")),
        *(Figure(name) for name in ("_rounds", "_seconds", "_variance")),
    )

    def __init__(self, candidates: Sequence[int]) -> None:
        self.candidates = tuple(candidates)
        self._at = 0  # the candidate of the present rounds
        self._since = 0  # rounds since it was chosen, including those that do not count
        self._least = 0  # the first candidate to try: lower ones make the same rounds as this one
        self._rounds, self._seconds, self._variance = ([0.0] * len(self.candidates) for _ in range(3))  # of the means

    @property
    def number(self) -> int:
        """The candidate for the next rounds."""
        return self.candidates[self._at]

    @property
    def unsettled(self) -> bool:
        """True if the present candidate is not the best one that is known, or its first rounds are not over."""
        known = self._known()
        best = min(known, key=self._seconds.__getitem__, default=self._at)
        return self._at != best or (self._since <= _ROUNDS_LEFT_OUT and len(known) > 1)

    def learn(self, seconds: float) -> None:
        """Learn that a round with ``number`` took so many seconds a sample."""
        self._since += 1
        if self._since <= _ROUNDS_LEFT_OUT:
            return
        at = self._at
        self._rounds = [n if k == at else n * (1.0 - _FORGOTTEN_PER_ROUND) for k, n in enumerate(self._rounds)]
        self._add(at, seconds)
        if self._since >= _ROUNDS_LEFT_OUT + _ROUNDS_PER_TRIAL:
            self._at, self._since = self._next(), _ROUNDS_LEFT_OUT
            if self._at != at:
                self._rounds[at], self._since = min(self._rounds[at], _ROUNDS_PER_TRIAL), 0

    def _add(self, k: int, seconds: float) -> None:
        """Add a round to the mean and the variance of a candidate."""
        if self._rounds[k] < 1.0:
            self._rounds[k], self._seconds[k], self._variance[k] = 1.0, seconds, 0.0
            return
        if not self._variance[k]:  # the first round may have been an outlier
            self._seconds[k] = min(self._seconds[k], _ROUND_COUNTS_UP_TO * seconds)
        self._rounds[k] = rounds = min(self._rounds[k] + 1.0, _ROUNDS_AVERAGED)
        missed = min(seconds, _ROUND_COUNTS_UP_TO * self._seconds[k]) - self._seconds[k]
        self._seconds[k] += missed / rounds
        self._variance[k] += ((1.0 - 1.0 / rounds) * missed * missed - self._variance[k]) / rounds

    def same_as(self, number: int) -> None:
        """Note that rounds with ``number`` equal rounds with this larger one, so those between need no trial."""
        while self._at + 1 < len(self.candidates) and self.candidates[self._at + 1] <= number:
            for of in (self._rounds, self._seconds, self._variance):
                of[self._at : self._at + 2] = [0.0, of[self._at]]
            self._at = self._least = self._at + 1

    def _known(self) -> list[int]:
        """Return the candidates that enough is known about."""
        return [k for k in range(self._least, len(self.candidates)) if self._rounds[k] >= 1.0]

    def _next(self) -> int:
        """Return the candidate to use next."""
        means, known = self._seconds, self._known()
        best = min(known, key=means.__getitem__)
        near = {k for k in known if means[k] <= _NEIGHBOUR_WITHIN * means[best]}
        unknown = [k for k in range(self._least, len(means)) if k not in known and {k - 1, k + 1} & near]
        if unknown:
            return min(unknown, key=lambda k: abs(k - best))
        # From 0.01, so that few equal rounds do not end the search, to 1: beyond, hopes would be below 0.
        scatter = min(max(0.01, *(math.sqrt(self._variance[k]) / means[k] for k in known)), 1.0)
        # Considered: leaving a number when the mean of the last eight rounds of another one is half a per cent less.
        # Such means differ by a tenth if ranks stumble, and good numbers were left.
        return min(known, key=lambda k: means[k] * (1.0 - _HOPE_PER_ERROR * scatter / math.sqrt(self._rounds[k])))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a search among as many candidates."""
        if not state["least"] <= state["at"] < len(self.candidates) == len(state["rounds"]):
            raise ValueError(
                f"state: trials must be among {list(self.candidates)}, got {dict(state)}; resume with the ranks, "
                "global_batch and micro_batches that saved it"
            )
        super().load_state_dict(state)
