"""Recurrent networks over the last two speeds, trained online with torch: baselines (lb-bsp sections 3.2.1, 5.4).

    h_1 = cell(u^{k-1}, 0),  h_2 = cell(u^k, h_1),  û^{k+1} = a·h_2 + b,      u = (v - mean) / deviation of the window

Trained by Adam on all pairs (two speeds, the next) of the last ``window`` (200) rounds, ``steps`` (60) full-batch
steps every ``retrain_every`` (50) rounds from the present weights, with the early stopping of lb-bsp section 4.2. Until
the first training, the forecast is an EMA (alpha 0.2). Training takes some 50 milliseconds *inside* ``update``, a
forecast about 0.1: these are baselines for comparison, not for training. Random numbers come from the predictor's own
seed, not from torch's global generator.

Differences from the paper: it states neither sizes nor schedule; 4 hidden units are arbitrary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hvd_hetero.prediction.base import Predictor

if TYPE_CHECKING:
    import torch


class Recurrent(Predictor):
    """Base of the recurrent baselines; a subclass names its layer, a class of ``torch.nn``."""

    layer: ClassVar[str]

    def __init__(
        self, *, seed: int = 0, hidden: int = 4, window: int = 200, retrain_every: int = 50, steps: int = 60
    ) -> None:
        super().__init__()
        for option, value, least in (
            ("hidden", hidden, 1),
            ("window", window, 10),
            ("retrain_every", retrain_every, 10),
            ("steps", steps, 1),
        ):
            if value < least:
                raise ValueError(f"{option}: must be at least {least}, got {value!r}")
        try:
            import torch
        except ImportError as error:
            raise ImportError(f"{type(self).__name__} needs torch: pip install torch") from error
        self._retrain_every, self._steps = retrain_every, steps
        self._speeds: deque[float] = deque(maxlen=window)
        self._ema, self._mean, self._deviation = 0.0, 0.0, 0.0  # deviation 0: not trained yet
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._net = torch.nn.ModuleList(
                [getattr(torch.nn, self.layer)(1, hidden, batch_first=True), torch.nn.Linear(hidden, 1)]
            ).double()

    def _apply(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return (N,) forecasts for (N, 2) standardised speeds."""
        states, _ = self._net[0](inputs[:, :, None])
        out: torch.Tensor = self._net[1](states[:, -1])[:, 0]
        return out

    def _observe(self, speed: float, cpu: float, memory: float) -> None:
        self._ema = speed if self.rounds == 0 else self._ema + 0.2 * (speed - self._ema)
        self._speeds.append(speed)
        if (self.rounds + 1) % self._retrain_every == 0:
            self._train()

    def _forecast(self, cpu: float, memory: float) -> float:
        if self._deviation == 0.0:
            return self._ema
        import torch

        latest = [(self._speeds[k] - self._mean) / self._deviation for k in (-2, -1)]
        with torch.no_grad():
            return self._mean + self._deviation * float(self._apply(torch.tensor([latest], dtype=torch.float64))[0])

    def _train(self) -> None:
        import torch

        speeds = np.array(self._speeds)
        self._mean = float(np.mean(speeds))
        self._deviation = max(float(np.std(speeds)), 1e-6 * self._mean)
        series = torch.from_numpy((speeds - self._mean) / self._deviation)
        inputs, targets = series.unfold(0, 2, 1)[:-1], series[2:]
        optimizer = torch.optim.Adam(self._net.parameters(), lr=0.02)
        before, idle = float("inf"), 0
        for _ in range(self._steps):
            optimizer.zero_grad()
            loss = torch.mean((self._apply(inputs) - targets) ** 2)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            # Early stopping as in lb-bsp section 4.2: four steps in a row that lower the loss by less than 1e-4.
            idle = idle + 1 if before - loss.item() < 1e-4 else 0
            if idle >= 4:
                break
            before = loss.item()

    def _state(self) -> dict[str, Any]:
        return {
            "speeds": list(self._speeds),
            "ema": self._ema,
            "scale": [self._mean, self._deviation],
            "weights": {name: tensor.tolist() for name, tensor in self._net.state_dict().items()},
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        import torch

        weights = {name: torch.tensor(value, dtype=torch.float64) for name, value in state["weights"].items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in self._net.state_dict().items()}
        if {name: tuple(tensor.shape) for name, tensor in weights.items()} != shapes:
            raise ValueError(
                f"state: weights must have the shapes {shapes}; build the predictor with the same hidden size"
            )
        self._net.load_state_dict(weights)
        self._speeds = deque(map(float, state["speeds"]), maxlen=self._speeds.maxlen)
        self._ema = float(state["ema"])
        self._mean, self._deviation = map(float, state["scale"])


class SimpleRNN(Recurrent):
    """Predict by an Elman network over the last two speeds; needs torch."""

    name, layer = "simple_rnn", "RNN"


class LSTM(Recurrent):
    """Predict by an LSTM over the last two speeds; needs torch."""

    name, layer = "lstm", "LSTM"
