"""What one rank learns from the times of its rounds: the speed to expect, and what that depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import add
from typing import TYPE_CHECKING, Any

from hvd_hetero.kept import Kept
from hvd_hetero.measurement.fixed_cost import Pace
from hvd_hetero.measurement.hindrances import Surroundings
from hvd_hetero.prediction.base import Predictor
from hvd_hetero.rounds import NO_SAMPLES, MicroBatch, SampleFigures

if TYPE_CHECKING:
    from hvd_hetero.measurement.cost_fit import CostMeter
    from hvd_hetero.measurement.device_profile import DeviceProfile

_CURVE = ("slope_s", "intercept_s", "saturation")


@dataclass(slots=True)
class OwnRound:
    """What one rank has done in a round, or in several: then these are the sums."""

    samples: int = 0
    weight: float = 0.0
    figures: SampleFigures = NO_SAMPLES
    micro_batches: int = 0
    compute_s: float = 0.0
    input_s: float = 0.0
    disturbed: bool = False
    teaches: bool = False
    """Whether its speed says something about later rounds."""
    once_s: float = 0.0
    """Seconds that come once a round: the update before it, or in it, and waiting for its first micro-batch."""
    held_s: float = 0.0
    """Seconds that layers, and others behind the rank's work, kept it waiting."""
    rounds: int = 1
    planned: int = 0
    """Micro-batches that the policy counts, where these are done in others; 0: those that are done."""

    @property
    def busy_s(self) -> float:
        """Seconds at work, and waiting for its own data."""
        return self.compute_s + self.input_s

    def add(self, samples: int, weight: float, figures: SampleFigures | None) -> None:
        """Add the samples of a micro-batch that is done."""
        self.samples += samples
        self.weight += weight
        if figures is not None:
            self.figures = SampleFigures(*map(add, self.figures, figures))
        self.micro_batches += 1 if samples else 0

    def __add__(self, other: OwnRound) -> OwnRound:
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return OwnRound(**sums | {"figures": SampleFigures(*map(add, self.figures, other.figures))})


class SpeedLearner(Kept):
    """A rank's predictor, and what it needs beside: the fixed cost, a device's curve, the costs of samples."""

    PARTS = ("predictor", "pace", "profile", "costs")

    def __init__(
        self, predictor: Predictor, pace: Pace | None, profile: DeviceProfile | None, surroundings: Surroundings
    ) -> None:
        self.predictor, self.pace, self.profile = predictor, pace, profile
        self.costs: CostMeter | None = None
        """What samples of unequal lengths cost; None: as many as they are."""
        self.surroundings = surroundings

    def learn(self, known: OwnRound) -> None:
        """Learn the speed, the fixed cost, the device's curve and the costs of samples from a round."""
        count, seconds = known.planned or known.micro_batches, known.busy_s
        if self.costs is not None and round(known.figures.number) == known.samples:
            self.costs.learn(known.figures, known.micro_batches, seconds)
        size, seconds = self.work_of(known) / count, seconds / count
        speed = size / seconds
        if self.pace is not None:
            self.pace.size = size
            speed = self.pace.of(size, seconds)
        self.predictor.update(speed, cpu=self.surroundings.cpu, memory=self.surroundings.memory)
        if self.profile is not None:
            self.profile.observe(round(size), seconds)

    def enable_costs(self) -> CostMeter:
        """Learn from now on what samples cost by their lengths, and return what learns it."""
        if self.costs is None:
            from hvd_hetero.measurement.cost_fit import CostMeter  # SciPy takes some tenths of a second

            self.costs = CostMeter()
        return self.costs

    def work_of(self, known: OwnRound | MicroBatch) -> float:
        """Return samples, each as many as it costs of a mean one, or as one if its length is not known."""
        if self.costs is None or known.figures is None:
            return known.samples
        return self.costs.work_of(known.figures) + known.samples - known.figures.number

    def expected(self) -> float:
        """Return the speed that the rank predicts now, with a typical micro-batch; NaN: nothing was measured."""
        expected = self.predictor.predict(cpu=self.surroundings.cpu, memory=self.surroundings.memory)
        return expected if self.pace is None else self.pace.speed(expected)

    def row(self, done: OwnRound) -> dict[str, float]:
        """Return the figures for the table; ``done`` is the round that it tells of."""
        gamma = None if self.profile is None else self.profile.gamma
        row = {
            "samples_per_s": self.expected(),
            "fixed_samples": 0.0 if self.pace is None else self.pace.samples,
            **{name: 0.0 if gamma is None else getattr(gamma, name) for name in _CURVE},
        }
        if self.costs is not None:
            rule, figures = self.costs.rule, done.figures
            unpadded = figures._replace(padded=figures.length, padded_square=figures.square)
            whole = rule.of(figures)
            row |= {
                "work": self.work_of(done) / done.rounds,
                "padding": 1.0 - rule.of(unpadded) / whole if whole else 0.0,
                "by_number": self.costs.by_number,
                **{f"cost_{name}": of for name, of in rule._asdict().items() if self.costs.learned},
            }
        return row

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what was learned, costs of samples included."""
        if state["costs"] is not None:
            self.enable_costs()
        super().load_state_dict(state)
