r"""What a micro-batch costs besides its samples, found while training goes on.

A micro-batch of x samples takes ``t = s (x + β)`` seconds: s is a sample's, and β the fixed part, in samples that
would take as long. Most real steps have such a part: kernels to launch, layers that do not care for the batch, the
update. The speed x / t then tells as much of the batch as of the rank, and where β outweighs x any split seems as good
as any other. (x + β) / t tells what the rank does, whatever its batch.

s moves, as other programs come and go; β belongs to model and processor. It shows where the batch changes and the rank
does not: in the short last round of an epoch, and wherever a plan moves samples. Let y be the mean of log t over up to
M rounds with micro-batches of x samples, and y', x' those of the rounds before, which had another size. For n and n'
rounds,

    e(β) = (y - y') - log((x + β) / (x' + β))        is noise, of variance σ² (1/n + 1/n') + σ_0²

Each φ of a grid in [0, 1), the fixed share of a micro-batch of the reference size r, with ``β = r φ / (1 - φ)``, keeps

    L(φ) <- λ L(φ) + (ν + 1) log(1 + e(β)² / (ν var e)),       λ = 1 - Λ min(1, (log(x / x'))² / (25 var e))

twice the negative logarithm of a Student likelihood, in which one strange pair of stretches does not outweigh two good
ones. A pair that tells nothing makes nothing forgotten. A priori φ = 0 is as likely as ten times all others together,
since small parts are not worth their error. Where 0 is not the likelier, the estimate is the mean of φ less its
variance over C, and at least 0: of what is not known well little is counted. (A limit on the deviation, below which the
mean counted, left a rank without samples whose φ was 0.76 with a deviation of 0.17.)

Four changes are told from a change of the batch. A rank that drifts makes the plan drift with it, so that its time
stays: twice what the last two rounds of a stretch differ from all of it goes to the variance, and a change of size that
is below two deviations tells nothing. A level that jumps while the batch stays (by five deviations) begins
a new stretch: the rank has become slower or faster. A change beyond what any β explains is of rank and batch together,
and tells nothing. Nor do rounds with other drivers, of ranks that foresee their pace by them: their plans change the
batch just as the pace changes, and the time stays. σ is 1.48 medians of what a round differs from its stretch, found by
steps of a tenth up or down.

M = 8, ν = 4, Λ = 0.1, σ_0 = 0.01, C = 0.15 are arbitrary, and so are 5 and 25. Cost: a logarithm a round; some
operations on the grid of 40 in the M rounds after a change of size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FixedCost"]

_LONGEST = 8  # M
_TAILS = 4.0  # ν
_FORGETS = 0.1  # Λ
_INFORMED = 25.0  # deviations², at which a pair of stretches makes the most forgotten
_MODEL = 0.01  # σ_0: what a line does not say of a real step
_LEAST_NOISE = 1e-4
_FIRST_NOISE, _STEP, _NORMAL = 0.02, 1.1, 0.6745
_JUMP, _LEAST_JUMP = 5.0, 0.05
_SAME_DRIVER = 0.05
_TELLS = 4.0  # deviations², which a change of size must come to
_BEYOND = 4.0  # deviations from what any β explains
_CAUTION = 0.15  # C

_SHARES = np.concatenate([np.linspace(0.0, 0.9, 31), np.linspace(0.92, 0.98, 7), [0.99, 0.995]])  # φ
_ODDS = _SHARES / (1.0 - _SHARES)  # β / r
_UNLIKELY = np.where(_SHARES > 0.0, 2.0 * math.log(10.0 * len(_SHARES)), 0.0)


@dataclass(slots=True)
class _Stretch:
    """Rounds in which micro-batches had one size."""

    size: float
    level: float
    """The mean of log t, with weights that fall exponentially over M rounds."""
    latest: float
    """The same, of about the last two rounds."""
    drivers: tuple[float, ...]
    """Those of its first round."""
    rounds: int = 1

    @property
    def counted(self) -> int:
        """Rounds in the level."""
        return min(self.rounds, _LONGEST)


class FixedCost:
    """One rank's β. ``reference`` is the size of micro-batch for which speeds are told."""

    def __init__(self, reference: float) -> None:
        self.reference = reference
        self.samples = 0.0
        """β; 0 where it is not known"""
        self._unit = reference  # r, as it was when this began
        self._size = reference  # of the latest round that teaches
        self._factor = 1.0  # c
        self._against = np.zeros(len(_SHARES))  # L
        self._judged: npt.NDArray[np.float64] | None = None  # L and what the last two stretches say: β is by that
        self._noise = _FIRST_NOISE  # σ
        self._now: _Stretch | None = None
        self._before: _Stretch | None = None

    def learn(self, size: float, seconds: float, drivers: tuple[float, ...] = (), *, teaches: bool) -> float:
        """A round's micro-batches had this size in the mean, and took so long each. Returns the rank's pace.

        That is (x + β) / t times a factor c, by which a new β leaves the pace of the latest round that ``teaches`` as
        it was: who forecasts paces need not hear of it. ``drivers`` are those by which the pace is foreseen.
        """
        before = self.samples
        self._observe(size, seconds, drivers)
        self._factor *= (self._size + before) / (self._size + self.samples)
        if teaches:
            self._size = size
        return self._factor * (size + self.samples) / seconds

    def speed(self, pace: float) -> float:
        """The speed of micro-batches of the reference size at a pace that was made of what ``learn`` returned."""
        return pace / self._factor * self.reference / (self.reference + self.samples)

    def _observe(self, size: float, seconds: float, drivers: tuple[float, ...]) -> None:
        level, now = math.log(seconds), self._now
        if now is None or size != now.size:
            self._keep_evidence()
            self._before, self._now = now, _Stretch(size, level, level, drivers)
            self._judge()
            return
        missed, deviation = abs(level - now.level), self._noise * math.sqrt(1.0 + 1.0 / now.counted)
        if missed > max(_JUMP * deviation, _LEAST_JUMP):
            self._keep_evidence()
            self._before, self._now = None, _Stretch(size, level, level, drivers)
            return
        self._noise = max(self._noise * (_STEP if missed > _NORMAL * deviation else 1.0 / _STEP), _LEAST_NOISE)
        now.rounds += 1
        now.latest += 0.5 * (level - now.latest)
        now.level += (level - now.level) / now.counted
        if self._before is not None:
            self._judge()
            if now.rounds == _LONGEST:
                self._keep_evidence()
                self._before = None

    def _judge(self) -> None:
        """β by all that is known."""
        evidence = self._evidence()
        against = self._against if evidence is None else evidence[1] * self._against + evidence[0]
        if against is self._judged:
            return
        self._judged = against
        against = against + _UNLIKELY
        likely = np.exp(-0.5 * (against - against.min()))
        likely /= likely.sum()
        mean = float(likely @ _SHARES)
        variance = float(likely @ (_SHARES - mean) ** 2)
        share = max(mean - variance / _CAUTION, 0.0) if likely[0] < 0.5 else 0.0
        self.samples = self._unit * share / (1.0 - share)

    def _keep_evidence(self) -> None:
        if self._judged is not None:
            self._against = self._judged

    def _evidence(self) -> tuple[npt.NDArray[np.float64], float] | None:
        """What the last two stretches say against each φ, if anything, and how much of the rest stays."""
        before, now = self._before, self._now
        if before is None or now is None:
            return None
        if any(abs(b - a) >= _SAME_DRIVER for a, b in zip(before.drivers, now.drivers, strict=True)):
            return None
        changed, most = now.level - before.level, math.log(now.size / before.size)
        variance = self._noise**2 * (1.0 / now.counted + 1.0 / before.counted) + _MODEL**2
        drift = before.latest - before.level
        variance += 4.0 * max(drift * drift - 0.5 * self._noise**2, 0.0)
        if most * most < _TELLS * variance:
            return None
        beyond = max(changed - max(most, 0.0), min(most, 0.0) - changed)
        if beyond > _BEYOND * math.sqrt(variance):
            return None
        betas = self._unit * _ODDS
        error = changed - np.log((now.size + betas) / (before.size + betas))
        kept = 1.0 - _FORGETS * min(1.0, most * most / (_INFORMED * variance))
        return (_TAILS + 1.0) * np.log1p(error * error / (_TAILS * variance)), kept

    def state(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, attribute) for name, attribute in _SAVED.items()} | {
            "against": self._against.tolist()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take it back. The rank's pace may be another by now: what was measured last is not compared with it."""
        numbers = {name: float(state[name]) for name in _SAVED}
        against = np.array(state["against"], dtype=np.float64)
        whole = against.shape == _SHARES.shape and bool((np.isfinite(against) & (against >= 0)).all())
        if not (whole and all(0 < x < math.inf or (name == "samples" and x == 0) for name, x in numbers.items())):
            raise ValueError(
                f"state: {', '.join(_SAVED)} must be positive and finite (samples may be 0), and so must be the "
                f"{len(_SHARES)} numbers of against, got {state}; resume from a whole state"
            )
        for name, attribute in _SAVED.items():
            setattr(self, attribute, numbers[name])
        self._against = against
        self._now = self._before = self._judged = None


_SAVED = {"samples": "samples", "unit": "_unit", "size": "_size", "factor": "_factor", "noise": "_noise"}
