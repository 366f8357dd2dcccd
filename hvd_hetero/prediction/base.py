"""The base of all predictors: measured speeds in, the speed of the next round out.

After round ``k``, a predictor gets the measured speed ``v^k`` (samples per second), and the drivers ``c^k`` and ``m^k``
that were read *before* that round (`measurement.readings`). It predicts ``v^{k+1}`` before round ``k+1``. Each rank
runs its own predictor on its own history, and its prediction travels in the table. So the cost per rank does not grow
with the number of ranks (lb-bsp trains all models on one server; see `hvd_hetero.prediction.narx`).

Contract, checked by a conformance suite (`hvd_hetero.testing.predictors`) for every member of the family:

- ``predict`` is ``nan`` before the first valid measurement, finite and positive afterwards;
- whatever the drivers say, a forecast is between the slowest measured speed / `MARGIN` and `MARGIN` times the fastest;
- a speed that is NaN, zero, negative or infinite is no measurement: it is ignored, and the history keeps its last;
- two predictors with the same options and the same history have the same forecast;
- ``state_dict`` is plain data that survives JSON, and carries a name and a version. It holds what was learnt, not how
  the predictor was built: loaded into one with other options, it goes on from that history with those options.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from hvd_hetero.kept import Kept

# Arbitrary: a CPU that has doubled since the first round is believed, one that has grown tenfold in part.
MARGIN = 2.0


class Predictor(Kept, ABC):
    """One rank's forecast of its own speed. Subclasses observe and forecast; this class checks what goes in and out."""

    name: ClassVar[str]
    uses_drivers: bool = False  # whether the drivers are worth reading on the training path
    version: ClassVar[int] = 2  # of the layout of state_dict

    def __init__(self) -> None:
        self.rounds = 0  # valid measurements seen
        self.rejected = 0  # forecasts that were not finite and positive, answered by the last measurement instead
        self._last = math.nan
        self._slowest, self._fastest = math.inf, 0.0

    def update(self, speed: float, cpu: float | None = None, memory: float | None = None) -> None:
        """Learn the measured speed of a round, with the drivers read before it (``None`` or NaN: not known)."""
        cpu_known, memory_known = driver("cpu", cpu), driver("memory", memory)
        speed = float(speed)
        if not usable(speed):
            return
        self._observe(speed, cpu_known, memory_known)
        self._last = speed
        self._slowest, self._fastest = min(self._slowest, speed), max(self._fastest, speed)
        self.rounds += 1

    def predict(self, cpu: float | None = None, memory: float | None = None) -> float:
        """Return the samples per second expected in the next round, given the present drivers."""
        cpu_known, memory_known = driver("cpu", cpu), driver("memory", memory)
        if self.rounds == 0:
            return math.nan
        try:
            forecast = self._forecast(cpu_known, memory_known)
        except OverflowError:  # math.exp
            forecast = math.inf
        if usable(forecast):
            return min(max(forecast, self._slowest / MARGIN), MARGIN * self._fastest, sys.float_info.max)
        self.rejected += 1
        return self._last

    def state_dict(self) -> dict[str, Any]:
        """Return all that a successor needs, as versioned plain data (JSON-able)."""
        speeds = [self._last, self._slowest, self._fastest] if self.rounds else None
        return {
            "predictor": self.name,
            "version": self.version,
            "rounds": self.rounds,
            "measured": speeds,
            **self._state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the predictor that wrote ``state`` stopped."""
        for key, mine in (("predictor", self.name), ("version", self.version)):
            if state.get(key) != mine:
                raise ValueError(
                    f"state: {key} must be {mine!r} to load into {type(self).__name__}, got "
                    f"{state.get(key)!r}; load it into the predictor that saved it, or start without a state"
                )
        rounds, speeds = int(state["rounds"]), state["measured"]
        last, slowest, fastest = (math.nan, math.inf, 0.0) if speeds is None else map(float, speeds)
        known = usable(slowest) and usable(fastest) and slowest <= last <= fastest
        if known != (rounds > 0):
            raise ValueError(
                f"state: measured must be the last, slowest and fastest speed after {rounds} rounds, got {speeds!r}; "
                "load the whole state that state_dict() returned, or start without a state"
            )
        self._restore(state)
        self.rounds, self._last, self._slowest, self._fastest = rounds, last, slowest, fastest

    @abstractmethod
    def _observe(self, speed: float, cpu: float, memory: float) -> None:
        """Take in one valid measurement (``self._last`` still holds the one before). Drivers may be NaN."""

    @abstractmethod
    def _forecast(self, cpu: float, memory: float) -> float:
        """Return the next speed; called only after a valid measurement. Drivers may be NaN."""

    def _state(self) -> dict[str, Any]:
        """Return the subclass's part of ``state_dict``: its ``KEPT``, or what it overrides this with."""
        return Kept.state_dict(self)

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Load that part; raise ValueError before changing anything if it is not valid."""
        Kept.load_state_dict(self, state)


def usable(speed: float) -> bool:
    """Return whether a number is a speed: finite and positive."""
    return math.isfinite(speed) and speed > 0.0


def driver(name: str, value: float | None) -> float:
    """Return a driver as a float in [0, 1], or NaN if it is not known."""
    known = math.nan if value is None else float(value)
    if known < 0.0 or known > 1.0:  # false for NaN
        raise ValueError(f"{name} must be the fraction that is available, in [0, 1], got {value!r}; None: not known")
    return known


def log_driver(available: float) -> float:
    """Return a driver's logarithm; NaN if it is not known."""
    # 0 has no logarithm, and below 1 % differences mean nothing.
    return available if math.isnan(available) else math.log(max(available, 0.01))
