"""The conformance suite for predictors, to run on your own.

    class TestMine(PredictorConformance):
        def make(self):
            return Mine()

pytest runs the methods that begin with ``test_``; without pytest, call ``hvd_hetero.testing.policies.run(TestMine())``.
A predictor that passes answers every question with a speed or NaN, learns only from measurements, and goes on
after a restart.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd_hetero.prediction import Predictor
from hvd_hetero.prediction.base import MARGIN

_NO_SPEEDS = (math.nan, 0.0, -3.0, math.inf, -math.inf)
_NO_DRIVERS = (("cpu", 80.0, 0.5), ("memory", 0.5, -0.1), ("cpu", math.inf, 0.5))
_FOREIGN: dict[str, Any] = {"predictor": "oracle", "version": 99, "measured": [-1.0, -1.0, -1.0], "rounds": 0}


class _Measured(NamedTuple):
    speed: float
    cpu: float
    memory: float


class PredictorConformance(ABC):
    """The conformance suite. Override ``make``, and ``rounds`` if your predictor reaches its last phase later."""

    rounds: ClassVar[int] = 110
    """Rounds to feed: enough that each phase of a predictor's life is met."""

    @abstractmethod
    def make(self) -> Predictor:
        """Return a new predictor, built alike each time."""

    def test_it_knows_nothing_before_the_first_measurement_and_always_something_after(self) -> None:
        """Check that a forecast is NaN first, and then finite and positive."""
        forecasts = feed(self.make(), walk(self.rounds))
        assert math.isnan(forecasts[0])
        assert all(math.isfinite(f) and f > 0 for f in forecasts[1:])

    def test_what_is_no_speed_is_ignored(self) -> None:
        """Check speeds after a clock jumped, or a round without samples."""
        for bad in _NO_SPEEDS:
            p, q = self.make(), self.make()
            p.update(bad, 0.5, 0.5)
            assert math.isnan(p.predict(0.5, 0.5))
            for k, measured in enumerate(walk(45)):
                p.update(*measured)
                q.update(*measured)
                if k % 5 == 0:
                    p.update(bad, 0.9, 0.1)
            assert p.predict(0.5, 0.5) == q.predict(0.5, 0.5)
            assert p.rounds == q.rounds == 45

    def test_drivers_may_come_and_go(self) -> None:
        """Check forecasts if the kernel does not report what CPU or memory is available."""
        p = self.make()
        for k, (speed, cpu, memory) in enumerate(walk(60)):
            p.update(speed, *[(cpu, memory), (None, None), (math.nan, memory), (cpu, None)][k % 4])
            assert math.isfinite(p.predict())
            assert p.predict(math.nan, 0.3) > 0

    def test_a_driver_that_is_no_fraction_is_an_error_that_names_it(self) -> None:
        """Check that the error names the driver, and that nothing is learned."""
        for named, cpu, memory in _NO_DRIVERS:
            p = self.make()
            assert f"{named} must be the fraction" in _refusal(lambda: p.update(100.0, cpu, memory))  # noqa: B023
            assert named in _refusal(lambda: p.predict(cpu, memory))  # noqa: B023
            assert p.rounds == 0

    def test_predicting_changes_nothing(self) -> None:
        """Check that forecasts do not depend on how often they are asked for, which differs between ranks."""
        p, q = self.make(), self.make()
        for measured in walk(50):
            for _ in range(3):
                p.predict(0.1, 0.9)
            p.update(*measured)
            q.update(*measured)
        assert p.predict(0.4, 0.5) == q.predict(0.4, 0.5)

    def test_built_alike_and_fed_alike_it_predicts_alike(self) -> None:
        """Check that a predictor draws no random numbers of its own, and reads no clock."""
        assert feed(self.make(), walk(70))[1:] == feed(self.make(), walk(70))[1:]

    def test_its_state_is_plain_data_and_a_successor_goes_on_as_it_would(self) -> None:
        """Check that a state survives JSON, in which checkpoints and changes of membership carry it."""
        rounds = walk(self.rounds)
        for at in (0, 1, 2, self.rounds // 3, 2 * self.rounds // 3):
            p, q = self.make(), self.make()
            feed(p, rounds[:at])
            state = json.loads(json.dumps(p.state_dict(), allow_nan=at == 0))
            assert (state["predictor"], state["version"]) == (p.name, p.version)
            q.load_state_dict(state)
            assert q.rounds == at
            assert q.state_dict() == p.state_dict()
            np.testing.assert_array_equal(feed(p, rounds[at:]), feed(q, rounds[at:]))

    def test_a_foreign_state_is_refused(self) -> None:
        """Check that an error refuses the state, instead of wrong forecasts."""
        p = self.make()
        feed(p, walk(5))
        for key, value in _FOREIGN.items():
            state = {**p.state_dict(), key: value}
            assert "state" in _refusal(lambda: self.make().load_state_dict(state))  # noqa: B023

    def test_a_forecast_stays_near_the_speeds_that_were_measured(self) -> None:
        """Check that a forecast is within a factor of two, also for drivers that were never read before."""
        p = self.make()
        slowest, fastest = math.inf, 0.0
        for k, (speed, cpu, _) in enumerate(walk(80)):
            p.update(speed, cpu, (0.6, 0.001)[k % 10 == 0])
            slowest, fastest = min(slowest, speed), max(fastest, speed)
            for now, memory in ((0.0, 1.0), (1.0, 0.001), (0.001, 0.6), (cpu, 0.0)):
                assert slowest / MARGIN <= p.predict(now, memory) <= MARGIN * fastest

    def test_a_constant_speed_is_predicted_after_few_rounds(self) -> None:
        """Check the forecast to 2 %, after 60 rounds."""
        p = self.make()
        for _ in range(60):
            p.update(250.0, 0.5, 0.5)
        assert abs(p.predict(0.5, 0.5) / 250.0 - 1.0) < 0.02


def walk(rounds: int, seed: int = 0) -> list[_Measured]:
    """Return measurements of a speed that follows its CPU, with noise."""
    rng = np.random.Generator(np.random.PCG64(seed))
    cpu = np.repeat(rng.uniform(0.2, 1.0, rounds // 8 + 1), 8)[:rounds]
    speeds = 500.0 * cpu * np.exp(rng.normal(0.0, 0.05, rounds))
    return [_Measured(float(v), float(c), 0.5) for v, c in zip(speeds, cpu, strict=True)]


def feed(p: Predictor, rounds: Iterable[_Measured]) -> list[float]:
    """Return what was forecast for each round, before it was measured."""
    forecasts = []
    for speed, cpu, memory in rounds:
        forecasts.append(p.predict(cpu, memory))
        p.update(speed, cpu, memory)
    return forecasts


def _refusal(call: Callable[[], object]) -> str:
    """Return the message of the ValueError that a call must end with."""
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("no ValueError was raised")
