"""NARX: the speed from its past and from the CPU available now (lb-bsp Eq. 4, sections 3.2.1 and 4.2).

    v̂^k = F(v^{k-1}, v^{k-2}, c^k, c^{k-1})

F is the network of `neural_network` (13 parameters) on logarithms relative to running means (``V``, ``C``: exponential
moving averages of the logarithms, with weight max(1/n, 0.05) for the latest of n):

    u = (log v^{k-1} - V, log v^{k-2} - V, log c^k - C, log c^{k-1} - C)
    v̂^k = exp(V + f(u))

So f = 0 is a slow EMA, f = log c^k - C is that EMA moved along with the CPU, and the past speeds
show how much of the latest deviation to believe.

EMA (alpha 0.2) forecasts until there is enough data. Then every ``retrain_every`` rounds the last ``window`` rounds are
fitted in the background (`training`).

Cost: O(1) per round, some 10 microseconds. State: about 100 kB at most (the window travels with it).

Differences from the paper: the memory available (Eq. 4's m) is read and not used. Look-back 2 is read as two values of
each series; logarithms relative to running means; Levenberg-Marquardt for Keras; one predictor per rank in its own
process, not all on one server; the check on the newest fifth. The shipped parameters come from
``benchmarks/train_narx.py`` and recorded traces of this project.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from importlib import resources
from typing import Any, ClassVar, cast

import numpy as np

from hvd_hetero.kept import Figure, Kept
from hvd_hetero.prediction.base import Predictor, log_driver
from hvd_hetero.prediction.narx import neural_network
from hvd_hetero.prediction.narx.training import Parameters, Trainer


@functools.cache
def shipped() -> Mapping[str, Any]:
    """Return the parameters that come with the package, and what they were trained on."""
    text = resources.files("hvd_hetero.prediction.narx").joinpath("warm.json").read_text(encoding="utf-8")
    return cast(Mapping[str, Any], json.loads(text))


class _Logarithms(Kept):
    """The latest logarithms of a series, newest first, and their running mean."""

    KEPT = (
        Figure("latest", least=-math.inf, any_length=True),
        Figure("mean", least=-math.inf),
        Figure("count", whole=True),
    )

    def __init__(self, length: int) -> None:
        self._length = length
        self.latest: list[float] = []
        self.mean = 0.0
        self.count = 0

    def add(self, logarithm: float) -> None:
        """Take in the logarithm of a round."""
        self.count += 1
        self.latest = [logarithm, *self.latest][: self._length]
        # 0.05 was as good as 0.02 and 0.1 on recorded traces, 0.2 a little worse.
        self.mean += (logarithm - self.mean) * max(1.0 / self.count, 0.05)


class NARX(Predictor):
    """Predict from past speeds and the drivers of the next round; learn online.

    ``warm_start``: "shipped" (parameters in the package), None (from scratch), or the ``state_dict`` of a former run,
    of which only the parameters are taken. ``background=False`` trains inside ``update``: reproducible
    to the last bit, for tests and simulations.
    """

    name = "narx"
    version: ClassVar[int] = 3
    KEPT = (
        *(Figure(name, least=-math.inf, any_length=True) for name in ("_parameters", "_start")),
        *(Figure(name) for name in ("_pull", "_ema")),
        Figure("_train_at", whole=True),
    )
    PARTS = ("_speeds", "_cpus")
    uses_drivers = True

    def __init__(
        self,
        *,
        warm_start: str | Mapping[str, Any] | None = "shipped",
        seed: int = 0,
        window: int = 500,
        rounds_from_scratch: int = 500,
        rounds_when_warm: int = 5,
        retrain_every: int = 100,
        background: bool = True,
    ) -> None:
        import scipy.optimize  # noqa: F401 - for its trainings: imported in one of them it would hold up rounds

        super().__init__()
        for option, value, least in (
            ("window", window, 20),
            ("rounds_from_scratch", rounds_from_scratch, 20),
            ("rounds_when_warm", rounds_when_warm, 2),
            ("retrain_every", retrain_every, 1),
        ):
            if value < least:
                raise ValueError(f"{option}: must be at least {least} rounds, got {value!r}")
        self._parameters = self._start_of(warm_start)
        self._start = self._parameters or neural_network.start(seed)
        # ρ of neural_network, arbitrary. From a warm start, recorded noise let weaker pulls make good parameters worse.
        self._pull = 100.0 if self._parameters else 0.01
        self._window, self._rounds_when_warm = window, rounds_when_warm
        self._retrain_every, self._trainer = retrain_every, Trainer(background)
        # Ranks of one machine begin at different rounds, so that their trainings rarely fall together.
        offset = os.getpid() % retrain_every if background else 0
        self._train_at = (max(20, retrain_every) if self._parameters else rounds_from_scratch) + offset
        self._rows: deque[tuple[float, ...]] = deque(maxlen=window)
        self._speeds, self._cpus = _Logarithms(2), _Logarithms(1)
        self._ema = 0.0

    @classmethod
    def _start_of(cls, warm_start: str | Mapping[str, Any] | None) -> Parameters:
        """Return the parameters to begin with; none from scratch."""
        if warm_start is None:
            return ()
        state = shipped() if warm_start == "shipped" else warm_start
        if isinstance(state, str):
            raise ValueError(
                f'warm_start must be "shipped", None or a state of NARX, got {state!r}; None starts from scratch'
            )
        if (named := (state.get("predictor"), state.get("version"))) != (cls.name, cls.version):
            raise ValueError(
                f"warm_start: must be the state of a narx predictor, version {cls.version}, got {named}; give what "
                "state_dict() of one has returned"
            )
        return _checked(state["parameters"])

    @property
    def trained(self) -> bool:
        """True if forecasts may come from the network already (given drivers), rather than from EMA."""
        return bool(self._parameters) and self.rounds >= self._rounds_when_warm

    @property
    def examples(self) -> list[tuple[float, ...]]:
        """The window that it learns from: per round the four inputs, the target, and EMA's forecast."""
        return list(self._rows)

    def _observe(self, speed: float, cpu: float, memory: float) -> None:
        log_v, log_c = math.log(speed), self._log_cpu(cpu)
        if (inputs := self._inputs(log_c)) is not None:
            mean = self._speeds.mean
            self._rows.append((*inputs, log_v - mean, math.log(self._ema) - mean))
        # With the weight of lb-bsp section 5.4.
        self._ema = speed if self.rounds == 0 else self._ema + 0.2 * (speed - self._ema)
        self._speeds.add(log_v)
        if not math.isnan(log_c):
            self._cpus.add(log_c)
        self._learn()

    def _forecast(self, cpu: float, memory: float) -> float:
        inputs = self._inputs(self._log_cpu(cpu)) if self.trained else None
        if inputs is None:
            return self._ema
        return math.exp(self._speeds.mean + neural_network.forward(self._parameters, inputs))

    def _log_cpu(self, cpu: float) -> float:
        """Return the logarithm of a round's CPU; if that is not known, of the last one, or NaN if none ever was."""
        if not math.isnan(cpu):
            return log_driver(cpu)
        return self._cpus.latest[0] if self._cpus.count else math.nan

    def _inputs(self, log_c: float) -> tuple[float, ...] | None:
        """Return ``u`` for a round with this CPU; None if the CPU was never known, or after fewer than two speeds."""
        # Logarithms, because a bigger model, a faster core or another batch size shifts them and changes nothing else.
        # "10 % less CPU, 10 % less speed" is the same pair of numbers everywhere, so parameters learnt on one machine
        # are a useful start on another. Without the memory, because it does not slow a step until it runs out. A
        # network that was trained while there was enough learns noise by it, and predicts five times the true speed
        # when a reading leaves its range (benchmarks/prediction_worlds.py).
        speeds, cpus = self._speeds, self._cpus
        if len(speeds.latest) < 2 or not cpus.count:
            return None
        return (*(v - speeds.mean for v in speeds.latest), log_c - cpus.mean, cpus.latest[0] - cpus.mean)

    def _learn(self) -> None:
        # Never waited for: one round hands a copy of the window over, and a later one picks the result up.
        self._parameters = self._trainer.result() or self._parameters
        if self.rounds + 1 < self._train_at or self._trainer.busy or len(self._rows) < 20:
            return
        self._train_at = self.rounds + 1 + self._retrain_every
        self._trainer.begin(_train, list(self._rows), self._parameters, self._start, self._pull)
        self._parameters = self._trainer.result() or self._parameters

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"rows": [list(row) for row in self._rows]}

    def _restore(self, state: Mapping[str, Any]) -> None:
        _checked(state["parameters"]), _checked(state["start"])
        rows = [tuple(map(float, row)) for row in state["rows"]]
        width = neural_network.INPUTS + 2  # the inputs, the target, and EMA's forecast
        if any(len(row) != width for row in rows):
            raise ValueError(f"state: rows must be {width} numbers each, got {state['rows']}")
        super()._restore(state)
        self._rows = deque(rows, maxlen=self._window)
        self._trainer = Trainer(self._trainer.background)  # a training under way is of the former state


def _train(rows: list[tuple[float, ...]], current: Parameters, start: Parameters, pull: float) -> Parameters | None:
    """Return parameters that fit the window, or None if they are worse than the present ones."""
    window = np.array(rows)
    inputs, targets, by_ema = window[:, : neural_network.INPUTS], window[:, -2], window[:, -1]
    old = len(rows) * 4 // 5
    fitted = neural_network.fit(
        current or start, inputs[:old], targets[:old], pull=pull, give_way=lambda: time.sleep(0)
    )
    in_use = neural_network.forward_rows(np.array(current), inputs)[0] if current else by_ema
    new = neural_network.forward_rows(np.array(fitted.parameters), inputs)[0]
    errors = [float(np.sum((forecast - targets)[old:] ** 2)) for forecast in (new, in_use)]
    return fitted.parameters if errors[0] <= errors[1] else None


def _checked(values: Any) -> Parameters:
    """Return parameters from plain data, or none from none."""
    numbers = tuple(float(x) for x in values)
    if len(numbers) not in (0, neural_network.PARAMETERS) or not all(map(math.isfinite, numbers)):
        raise ValueError(
            f"parameters must be {neural_network.PARAMETERS} finite numbers, got {values!r}; give those of a NARX"
        )
    return numbers
