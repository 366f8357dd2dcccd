"""Clocks that a test moves, so that it neither waits nor depends on how busy the machine is."""

import threading
import time


class ThreadClock(threading.local):
    """Each thread's own seconds, in the place of ``time.perf_counter``; they move with the work it is said to do."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


class JumpingClock:
    """In the place of the module ``time``: real time that may be moved on, so that a test reaches a limit at once."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s
