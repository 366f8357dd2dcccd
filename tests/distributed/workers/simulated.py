"""A clock that moves with the samples computed and with nothing else: measured speeds, and plans, are of the script."""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch_hooks.wires.waiting


class SimulatedClock:
    """Takes the place of ``time.perf_counter`` for all that is made after it, so make it before the LoadBalance.

    Ranks' clocks do not know each other: waiting for another rank, and moving data, take no time on them. How real time
    is passed meanwhile stays a matter of the real clock.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        torch_hooks.wires.waiting.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=time.sleep)
        time.perf_counter = self

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        """Takes the place of ``time.sleep``, too."""
        self.now_s += seconds
