r"""Which of some numbers makes rounds fastest, found by trying others.

The candidates are K_1 < K_2 < …, and j is the one in use. Let c be the seconds that a sample took in a round, and C the
mean of c over the rounds with K_j: of the first R of them, and from then on each later one moves it by 1 / R of the
difference. Now and then another K_k is tried for m rounds, whose mean is C'. The trial says that it gains

    2 (C - C') / (C + C')

and g_k is what its trials said in the mean of their first W rounds, and then moves by m / W of the difference: the
first trial decides alone, and of two or more the latest counts half. Where g_k is above half a hundredth, j becomes k,
and all gains become those over the new K_j. Whether it does or not, K_k is tried again after

    |k - j| max(8 m', (m + 2) max(0, |g_k| - e) / ε) rounds, at most 512,    e² = s² (1 / m' + 1 / M)

with s² the larger relative variance of c, m' the rounds in g_k and M those in C. So a trial costs about a share ε of
what is done until the next one. What is far worse is tried seldom; what is not known well, sooner.

At first the neighbours of K_j are tried. What lies beyond a candidate is tried if that one loses less than a twentieth:
4 micro-batches may be no better than 1 where 16 are. A candidate that was never tried comes first, the nearest before
others. Two rounds after each change do not count, for ranks get used to it in them.

m = 4, R = W = 8, ε = 0.0025 and the limits are arbitrary, chosen on the cases of ``benchmarks/micro_batches.py``.

Every operation is correctly rounded, so equal times give equal choices on all processors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Trials"]

_SETTLES, _TRIAL = 2, 4  # rounds: that do not count, m
_REMEMBERED, _POOLED = 8, 8  # R, W
_WORTH, _COST, _FAR = 0.005, 0.0025, 0.05  # gains: what a move needs, ε, and the loss beyond which nothing is tried
_SOONEST, _LATEST = 8, 512  # rounds between two trials of a candidate: times m', at most


@dataclass(slots=True)
class _Mean:
    """Of seconds a sample, with their variance; of the last R rounds as if exponential."""

    rounds: int = 0
    seconds: float = 0.0
    variance: float = 0.0

    def add(self, seconds: float) -> None:
        self.rounds = min(self.rounds + 1, _REMEMBERED)
        missed = seconds - self.seconds
        self.seconds += missed / self.rounds
        self.variance += ((1.0 - 1.0 / self.rounds) * missed * missed - self.variance) / self.rounds


@dataclass(slots=True)
class _Tried:
    """What trials of a candidate have said."""

    gain: float = 0.0
    rounds: int = 0
    due: int = 0
    """The first round in which it may be tried."""


@dataclass(slots=True)
class _Kept:
    """All that is known."""

    home: int = 0
    """j, the candidate in use."""
    at: int = 0
    """The candidate of the present rounds: j, or the one that is tried."""
    since: int = 0
    """Rounds since the candidate changed."""
    rounds: int = 0
    here: _Mean = field(default_factory=_Mean)
    there: _Mean = field(default_factory=_Mean)
    tried: list[_Tried] = field(default_factory=list)


class Trials:
    """The search among ``candidates``, which increase. It begins with the first."""

    def __init__(self, candidates: Sequence[int]) -> None:
        self.candidates = tuple(candidates)
        self._kept = _Kept(tried=[_Tried() for _ in self.candidates])

    @property
    def number(self) -> int:
        """The candidate for the next rounds."""
        return self.candidates[self._kept.at]

    @property
    def unsettled(self) -> bool:
        """Whether another candidate is being tried, or the one in use has hardly been taken up again."""
        kept = self._kept
        return kept.at != kept.home or kept.since <= min(_SETTLES, kept.rounds - 1)

    def learn(self, seconds: float) -> None:
        """A round with ``number`` took so many seconds a sample."""
        kept = self._kept
        kept.rounds += 1
        kept.since += 1
        if kept.since <= _SETTLES:
            return
        if kept.at == kept.home:
            kept.here.add(seconds)
            if kept.since >= _SETTLES + _TRIAL:
                self._begin()
        else:
            kept.there.add(seconds)
            if kept.there.rounds == _TRIAL:
                self._end()

    def same_as(self, number: int) -> None:
        """Rounds with ``number`` are rounds with this larger one, so the candidates between need no trial."""
        kept = self._kept
        if kept.at == kept.home:
            while kept.home + 1 < len(self.candidates) and self.candidates[kept.home + 1] <= number:
                kept.at = kept.home = kept.home + 1

    def _begin(self) -> None:
        """Try another candidate, if one is due."""
        kept = self._kept
        choices = [(kept.tried[k].due, abs(k - kept.home), -k) for k in self._allowed()]
        due, _, other = min(choices, default=(math.inf, 0, 0))
        if due <= kept.rounds:
            kept.at, kept.since, kept.there = -other, 0, _Mean()

    def _allowed(self) -> Iterator[int]:
        """The candidates that may be tried: neighbours, and what lies beyond those that are about as good."""
        kept = self._kept
        for side in (range(kept.home + 1, len(self.candidates)), range(kept.home - 1, -1, -1)):
            for k in side:
                yield k
                if kept.tried[k].rounds == 0 or kept.tried[k].gain < -_FAR:
                    break

    def _end(self) -> None:
        """Judge the trial, and move or return."""
        kept = self._kept
        here, there, this = kept.here, kept.there, kept.tried[kept.at]
        this.rounds = min(this.rounds + there.rounds, _POOLED)
        said = 2.0 * (here.seconds - there.seconds) / (here.seconds + there.seconds)
        this.gain += (said - this.gain) * there.rounds / this.rounds
        variance = max(here.variance, there.variance) * (1.0 / this.rounds + 1.0 / here.rounds)
        sure = max(0.0, abs(this.gain) - math.sqrt(variance) / here.seconds)
        wait = abs(kept.at - kept.home) * max(int((_TRIAL + _SETTLES) * sure / _COST), _SOONEST * this.rounds)
        this.due = kept.rounds + min(wait, _LATEST)
        if this.gain > _WORTH:
            kept.tried[kept.home] = _Tried(0.0, this.rounds, this.due)
            kept.tried = [_Tried(other.gain - this.gain, other.rounds, other.due) for other in kept.tried]
            kept.home, kept.here, kept.since = kept.at, there, _SETTLES
        else:
            kept.at, kept.since = kept.home, 0

    def state(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self._kept)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        try:
            kept = _Kept(
                **{name: int(state[name]) for name in ("home", "at", "since", "rounds")},
                here=_Mean(**state["here"]),
                there=_Mean(**state["there"]),
                tried=[_Tried(**of_one) for of_one in state["tried"]],
            )
            told = (state["here"], state["there"], *state["tried"])
            numeric = all(isinstance(x, int | float) for of_one in told for x in of_one.values())
        except (KeyError, TypeError, ValueError, OverflowError):  # of another version
            kept, numeric = _Kept(home=-1), True
        means, last = (kept.here, kept.there), len(self.candidates) - 1
        counts = [kept.home, kept.at, kept.since, kept.rounds, *(m.rounds for m in means)]
        counts += [n for of_one in kept.tried for n in (of_one.rounds, of_one.due)]
        if (
            not numeric
            or len(kept.tried) != last + 1
            or max(kept.home, kept.at) > last
            or min(counts) < 0
            or (kept.at != kept.home and not (kept.here.rounds and kept.here.seconds))  # a trial is compared with them
            or not all(0.0 <= x < math.inf for m in means for x in (m.seconds, m.variance))
            or not all(math.isfinite(of_one.gain) for of_one in kept.tried)
        ):
            raise ValueError(
                f"state: its trials must be among {list(self.candidates)}, with finite times and no negative counts, "
                f"got {dict(state)}; resume with the ranks, global_batch and micro_batches that saved it"
            )
        self._kept = kept
