"""What samples cost by their lengths, as one rank learns it, in units of a mean sample's cost."""

from __future__ import annotations

from collections.abc import Mapping
from operator import add
from typing import Any

from hvd_hetero.measurement.cost_fit import CostFit
from hvd_hetero.rounds import LENGTHS, NO_SAMPLES, CostRule, SampleFigures

__all__ = ["CostMeter"]


class CostMeter:
    """The costs of one training's samples."""

    def __init__(self) -> None:
        self._fit = CostFit()
        self._seen = NO_SAMPLES
        self._rule = LENGTHS
        self.learned = False
        """True: something was measured."""
        self.by_number = 0.0
        """Time of a round's latest rank if samples were divided by number, over what it is by cost."""

    @property
    def rule(self) -> CostRule:
        """What a sample costs, for a mean sample that costs 1."""
        return self._rule

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

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain data."""
        return {"fit": self._fit.state(), "seen": list(self._seen), "learned": self.learned}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load what ``state`` has returned."""
        self._fit.restore(state["fit"])
        self._seen, self.learned = SampleFigures(*state["seen"]), bool(state["learned"])
        self._scale()
