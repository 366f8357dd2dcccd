"""The host's clock for one micro-batch after the other, without what each waits for other ranks."""

from __future__ import annotations

import math
from collections.abc import Callable


class Passes:
    r"""The lengths of a rank's forward and backward passes, which show what a loop did besides before a batch.

    Between a batch's arrival and its loss lie its forward pass, and now and then other work, as an evaluation. A batch
    of b samples with f seconds until then, and g seconds of backward pass, usually takes, by the batch before it,

        f' max(b / b', g / g').

    Longer batches and slower processors move that along.
    """

    def __init__(self) -> None:
        self._before = (0.0, 0.0, 0)

    def excess_s(self, forward_s: float, backward_s: float, samples: int) -> float:
        """Return how many seconds before the loss of the next batch were not spent on it."""
        f, g, b = self._before
        self._before = forward_s, backward_s, samples
        usual_s = f * max(samples / b, backward_s / g) if f and g and b else forward_s
        # More than twice as much is no work on the batch, unless it comes with each: then the usual time holds it, too.
        # Twice is arbitrary: an evaluation of less than a forward pass moves a share less than other disturbances do.
        return forward_s - usual_s if forward_s > 2.0 * usual_s else 0.0


class BatchTimer:
    """Times the micro-batch at hand by ``clock``, which gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.running = False
        """True while a micro-batch is computed."""
        self.held_s = 0.0
        """Seconds that the micro-batch has spent waiting for other ranks."""
        self._began_at = self.done_at = clock()
        self._waits_since = math.nan  # NaN: it does not wait
        self._forward_s = math.nan  # until its loss was there, if that was noted
        self._passes = Passes()

    def begin(self) -> None:
        """Start the clock of a micro-batch."""
        self.running, self.held_s, self._forward_s = True, 0.0, math.nan
        self._began_at = self.clock()

    @property
    def own_s(self) -> float:
        """Seconds since the micro-batch began, without waiting."""
        return self.clock() - self._began_at - self.held_s

    def forward_done(self) -> None:
        """Note that the loss is there."""
        self._forward_s = self.own_s

    def begin_wait(self) -> bool:
        """Begin to wait for others; return False if nothing is at work, or it waits already."""
        holds = self.running and math.isnan(self._waits_since)
        if holds:
            self._waits_since = self.clock()
        return holds

    def end_wait(self) -> bool:
        """End the wait; return False if there was none."""
        waited = not math.isnan(self._waits_since)
        if waited:
            self.held_s += self.clock() - self._waits_since
            self._waits_since = math.nan
        return waited

    def done(self, samples: int) -> float:
        """End the micro-batch, and return the seconds of this rank's work on it."""
        self.running = False
        self.done_at = self.clock()
        own_s = self.done_at - self._began_at - self.held_s
        if math.isnan(self._forward_s):
            return own_s
        return own_s - self._passes.excess_s(self._forward_s, own_s - self._forward_s, samples)

    def forget(self) -> None:
        """Forget the micro-batch at hand."""
        self.running, self._waits_since = False, math.nan
