r"""The fixed cost of a micro-batch, besides its samples, learned from the table that all ranks share.

A micro-batch of x samples takes ``t = s (x + β)`` seconds: s is a sample's, and β the fixed part, in samples that
would take as long. Most real steps have such a part: kernels to launch, layers whose time does not depend on the batch,
the update. The speed x / t then depends on the batch as much as on the rank. The pace (x + β) / t does not.

s moves, as other programs come and go. β belongs to the step, which all ranks share: a rank at half the speed needs
twice as long for both parts. It shows if the batch changes and the rank does not: wherever a plan moves samples, and
in the short last round of an epoch. Each φ of a grid in [0, 1), the fixed share of a micro-batch of the reference size
r, with ``β = r φ / (1 - φ)``, forecasts the M rounds after a change of size by the mean level ℓ of those before:

    e(φ) = log t - log(x + β),     ν(φ) = e(φ) - ℓ(φ),     ℓ(φ) <- ℓ(φ) + ν(φ) / min(n + 1, M)
    L(φ) <- L(φ) + (τ + 1) log(1 + ν(φ)² / (τ v)),         v = σ² (1 + 1 / n) + σ_0²

with n the rounds in ℓ, and σ_0 = 0.01 for what a line leaves out of a real step. L is twice the negative logarithm of a
Student likelihood with τ degrees of freedom. While the size stays, all φ forecast alike, and a round that is out of
line begins no level: it may be a stumble, which the next plan answers by a change of size. σ is 1.48 medians of what
rounds differ from their level, found by steps of a tenth. Rank i's evidence is its own L_i and that of the others,
which counts for C at most. A priori all φ are equally likely, and β comes from the mean of φ. So a split
that is made before much is known does not count on the time to follow it.

Shapes: n ranks, a grid of G shares φ. Cost: O(n) a round, O(nG) in the M rounds after a change of size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_hetero.kept import Figure, Kept
from hvd_hetero.rounds import RoundTable

Floats = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.intp]

# All but the median are arbitrary.
_ROUNDS_COMPARED = 8  # M: so long a rank's speed has to stay, for its times to show the effect of the size
_STUDENT_FREEDOM = 4.0  # τ: with it, one outlier does not outweigh two good rounds
SCATTER_FLOOR = 1e-4  # of σ: after some equal rounds, not any difference is a surprise
SCATTER_STEP, NORMAL_MEDIAN = 1.1, 0.6745  # how fast σ moves in a round; the median of normal errors, in deviations
_CHANGE_DEVIATIONS, _CHANGE_OF_TIME = 5.0, 0.05  # beyond both, the rank itself has become slower or faster
_OTHERS_EVIDENCE_CAP = 20.0  # C: four and a half deviations, less than a rank of another kind finds out for itself
_EVIDENCE_CAP = 60.0  # of L: as much new evidence outweighs all before it

# φ, in steps of 0.05, and finer where β = r φ / (1 - φ) grows fast; arbitrary. 0.99 ends it: with more, a round would
# hardly depend on the split.
_SHARES = np.concatenate([np.linspace(0.0, 0.9, 19), [0.92, 0.94, 0.96, 0.98, 0.99]])


def _betas_of(reference: float) -> Floats:
    """Return the β of each φ, for a reference size r."""
    return reference * (_SHARES / (1.0 - _SHARES))


class FixedCosts(Kept):
    """The β of n ranks.

    Every rank computes it from the same tables, and reports its own. Policies use the reported ones, since two
    processors may round logarithms differently. What is kept is the evidence of all of them, for any number of ranks.
    """

    KEPT = (Figure("_reference", positive=True), Figure("_before", most=_EVIDENCE_CAP))

    def __init__(self, reference: float, workers: int) -> None:
        self.samples = np.zeros(workers)
        """β of each rank; 0 before there is evidence."""
        self._reference = reference
        self._betas = _betas_of(reference)
        self._against = np.zeros((workers, len(_SHARES)))  # L
        self._before = np.zeros(len(_SHARES))  # L of a former membership
        # σ before it is known: a guess (`policies.evidence` begins with more, to doubt moves). With more, the first
        # changes of size, which teach most, would count for less.
        self._noise = np.full(workers, 0.05)
        # Since a rank's size or its level changed: the size, the mean of log t, and the number of rounds.
        self._size, self._level, self._rounds = np.zeros((3, workers))
        # ℓ and n of each rank that is `_comparing`: it is in the M rounds after a change of size.
        self._forecast, self._counted = np.zeros((workers, len(_SHARES))), np.zeros(workers)
        self._comparing = np.zeros(workers, dtype=np.bool_)
        self._counts = np.zeros(workers)  # micro-batches of the round before
        self._drivers = np.full((2, workers), np.nan)
        self._moved = np.zeros(workers, dtype=np.bool_)  # whether these had changed in the round before

    def learn(self, table: RoundTable, *, short: bool = False) -> None:
        """Learn from a round; ``short``: it ends an epoch, and ranks do not report a speed for it."""
        late = table.column("lap_s") != 0.0  # a device, whose times belong to the round before
        samples, counts = table.column("timed_samples"), table.column("micro_batches")
        if short:
            samples = np.where(late, 0.0, table.work)
        each, self._counts = np.where(late, self._counts, counts), counts
        self._begin_again(np.stack([table.column("cpu"), table.column("memory")]))
        busy_s = table.busy_s
        at = np.flatnonzero((samples > 0.0) & (each > 0.0) & (busy_s > 0.0) & (busy_s < math.inf))
        if len(at):
            self._observe(samples[at] / each[at], np.log(busy_s[at] / each[at]), at)

    def _begin_again(self, drivers: Floats) -> None:
        """Forget the level of ranks whose CPU or memory has changed: a plan may have foreseen the change."""
        # By a twentieth of the CPU or the memory; with less, a rank counts as unchanged.
        moved = (np.abs(drivers - self._drivers) >= 0.05).any(axis=0)  # False where one is NaN
        if (either := moved | self._moved).any():
            self._rounds[either], self._comparing[either] = 0.0, False
        self._drivers, self._moved = drivers, moved

    def _observe(self, size: Floats, level: Floats, at: Ranks) -> None:
        """Learn from a round of the ranks ``at``: the size of their micro-batches, and log t, which ``level`` is.

        While a rank's size stays, `_level` and `_noise` follow its log t. A new size begins a comparison of the φ, each
        from the level before. The level begins anew with this round then, and with the next one if a time is no noise.
        """
        known, resized = self._rounds[at] > 0.0, size != self._size[at]
        if np.count_nonzero(begins := known & resized & ~self._comparing[at]):
            self._begin_comparing(at[begins])
        if np.count_nonzero(learns := self._comparing[at]):
            self._compare(size[learns], level[learns], at[learns])

        missed = np.abs(level - self._level[at])
        deviation = self._noise[at] * np.sqrt(1.0 + 1.0 / np.clip(self._rounds[at], 1.0, _ROUNDS_COMPARED))
        strange = known & ~resized & (missed > np.maximum(_CHANGE_DEVIATIONS * deviation, _CHANGE_OF_TIME))
        anew = ~known | resized | strange
        step = np.where(anew, 1.0, np.where(missed > NORMAL_MEDIAN * deviation, SCATTER_STEP, 1.0 / SCATTER_STEP))
        self._noise[at] = np.maximum(self._noise[at] * step, SCATTER_FLOOR)
        # 0 after a strange one. Counted as 1, a stumble was the level before: a rank whose share it moved learned φ =
        # 0.15 instead of 0.8, equal ranks went to 126 : 2, and no change of size came to correct it.
        rounds = self._rounds[at] = np.where(strange, 0.0, np.where(anew, 1.0, self._rounds[at] + 1.0))
        self._level[at] += (level - self._level[at]) / np.clip(rounds, 1.0, _ROUNDS_COMPARED)
        self._size[at] = size
        self._comparing[at] &= rounds < _ROUNDS_COMPARED

    def _begin_comparing(self, at: Ranks) -> None:
        """Begin to compare the φ, because the size has changed."""
        self._forecast[at] = self._level[at, None] - np.log(self._size[at, None] + self._betas)
        self._counted[at] = np.minimum(self._rounds[at], _ROUNDS_COMPARED)
        self._comparing[at] = True

    def _compare(self, size: Floats, level: Floats, at: Ranks) -> None:
        """Add to L how far each φ has missed log t, which ``level`` is, of the ranks ``at``."""
        variance = self._noise[at] ** 2 * (1.0 + 1.0 / self._counted[at]) + 0.01**2
        missed = level[:, None] - np.log(size[:, None] + self._betas) - self._forecast[at]
        # A round that every φ misses shows a change of the rank. It teaches nothing, and ℓ begins again.
        strange = np.abs(missed).min(axis=1) > np.maximum(_CHANGE_DEVIATIONS * np.sqrt(variance), _CHANGE_OF_TIME)
        self._comparing[at[strange]] = False
        if strange.all():
            return
        at, missed, variance = at[~strange], missed[~strange], variance[~strange]
        counted = self._counted[at] = np.minimum(self._counted[at] + 1.0, _ROUNDS_COMPARED)
        self._forecast[at] += missed / counted[:, None]
        against = self._against[at] + (_STUDENT_FREEDOM + 1.0) * np.log1p(
            missed**2 / (_STUDENT_FREEDOM * variance[:, None])
        )
        self._against[at] = np.minimum(against - against.min(axis=1, keepdims=True), _EVIDENCE_CAP)
        self._weigh_evidence()

    def _weigh_evidence(self) -> None:
        # The others' evidence decides if the rank's own is weak. Rejected: each rank learns its β alone. Noise made the
        # β of two equal ranks differ by a factor of 20, and a split made by them confirmed itself, down to a share of
        # one sample. Rejected, too: giving less weight to speeds that drift. It gains as much on the walks and traces
        # of benchmarks/ as it loses where noise is all there is.
        others = self._before + self._against.sum(axis=0) - self._against
        others -= others.min(axis=1, keepdims=True)
        others *= _OTHERS_EVIDENCE_CAP / np.maximum(others.max(axis=1, keepdims=True), _OTHERS_EVIDENCE_CAP)
        against = self._against + others
        likely = np.exp(-0.5 * (against - against.min(axis=1, keepdims=True)))
        likely /= likely.sum(axis=1, keepdims=True)
        share = likely @ _SHARES
        self.samples = self._reference * share / (1.0 - share)

    def state_dict(self) -> dict[str, Any]:
        """Return the evidence of all ranks together, as plain data."""
        against = self._before + self._against.sum(axis=0)
        return super().state_dict() | {"before": np.minimum(against - against.min(), _EVIDENCE_CAP).tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin from that evidence, also with other ranks and another reference size; forget what was learned here."""
        reference = self._reference
        super().load_state_dict(state)
        self._before = np.interp(self._betas, _betas_of(self._reference), self._before)
        self._reference = reference
        self._against[:], self._rounds[:], self._comparing[:] = 0.0, 0.0, False
        self.samples = np.zeros(len(self._rounds))
        if self._before.any():
            self._weigh_evidence()


class Pace(Kept):
    """A rank's speed freed from its batch, for its predictor.

    It is (x + β) / t times a factor c, by which a new β leaves the pace of the latest round as it was. So a predictor's
    history stays valid.
    """

    KEPT = (Figure("samples"), Figure("size", positive=True), Figure("_factor", positive=True))

    def __init__(self, reference: float) -> None:
        self._reference = reference
        self.samples = 0.0
        """The fixed cost β, in samples."""
        self.size = reference
        """The size of micro-batches in the latest round that taught something."""
        self._factor = 1.0  # c

    def set_fixed_cost(self, samples: float) -> None:
        """Set the fixed cost, and rescale so that the latest pace stays as it was."""
        self._factor = self._factor * (self.size + self.samples) / (self.size + samples)
        self.samples = samples

    def of(self, size: float, seconds: float) -> float:
        """Return the pace of a round whose micro-batches had this size and took so long each."""
        return self._factor * (size + self.samples) / seconds

    def speed(self, pace: float) -> float:
        """Return the speed at a pace, in micro-batches of the reference size."""
        return pace / self._factor * self._reference / (self._reference + self.samples)
