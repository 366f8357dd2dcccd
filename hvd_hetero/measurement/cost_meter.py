"""What samples cost by their lengths, as one rank learns it, in units of a mean sample's cost."""

from __future__ import annotations

from collections.abc import Mapping
from operator import add
from typing import Any

from hvd_hetero.kept import Figure, Kept
from hvd_hetero.measurement.cost_fit import CostFit
from hvd_hetero.rounds import LENGTHS, NO_SAMPLES, CostRule, SampleFigures

_TABLES = 20  # over which the unit is averaged (arbitrary)


class CostMeter(Kept):
    """The costs of one training's samples."""

    KEPT = (Figure("_seen"), Figure("learned"))
    PARTS = ("_fit",)

    def __init__(self) -> None:
        self._fit = CostFit()
        self._seen = NO_SAMPLES
        self._rule = LENGTHS
        self._agreed: CostRule | None = None
        self._unit, self._tables = 1.0, 0
        self.learned = False
        """True: something was measured."""
        self.by_number = 0.0
        """Time of a round's latest rank if samples were divided by number, over what it is by cost."""

    @property
    def rule(self) -> CostRule:
        """What a sample costs, for a mean sample that costs 1."""
        return self._rule

    def work_of(self, figures: SampleFigures) -> float:
        """Return what samples cost by the rule that they are divided by, in units of a mean sample with its padding.

        The rank's own rule may be wrong for what other ranks hold. Where all go by one rule, what it gets wrong of this
        rank's samples is part of its speed. A unit without padding would make all micro-batches larger than planned.
        """
        return self._unit * (self._agreed or self._rule).of(figures)

    def agree(self, rule: CostRule, work: float, samples: float) -> None:
        """Take the rule to divide by, and what all ranks did in a round: on average it is to be their samples."""
        self._agreed = rule
        if work > 0.0:
            self._tables += 1
            self._unit *= (samples / work) ** (1.0 / min(self._tables, _TABLES))

    def saw(self, figures: SampleFigures) -> None:
        """Note the samples of a round on all ranks, whose mean is the unit: no rank may take its own part for it."""
        self._seen = SampleFigures(*map(add, self._seen, figures))
        self._scale()

    def learn(self, figures: SampleFigures, micro_batches: float, seconds: float) -> None:
        """Learn from a round of this rank."""
        self._fit.learn(figures, micro_batches, seconds)
        self.learned = True
        self._scale()

    def _scale(self) -> None:
        rule = CostRule(*self._fit.coefficients.tolist()) if self.learned else LENGTHS
        unpadded = self._seen._replace(padded=self._seen.length, padded_square=self._seen.square)
        whole = rule.of(unpadded)
        self._rule = rule.scaled(unpadded.number / whole) if whole > 0.0 else CostRule(1.0, 0.0, 0.0, 0.0, 0.0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from that state."""
        super().load_state_dict(state)
        self._scale()
