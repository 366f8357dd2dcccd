"""What a rank does before its batch's forward pass, such as an evaluation every so many steps, told by its length.

A clock sees when a batch is drawn, and when its loss is there: forward passes, and whatever else came before. A batch
of b samples with f seconds until then, and g seconds of backward pass, usually takes, by the batch before it,

    f' max(b / b', g / g').

Longer batches and slower processors move that along. What makes f more than twice as much is no work on the batch. It
is work, however, if it comes with each: then f' holds it, too.
"""

from __future__ import annotations

_FAR = 2.0  # arbitrary: an evaluation of less than a forward pass moves a share less than other disturbances do


class Passes:
    """The forward and backward passes of one rank."""

    def __init__(self) -> None:
        self._before = (0.0, 0.0, 0)

    def excess_s(self, forward_s: float, backward_s: float, samples: int) -> float:
        """Return how many seconds before the loss of the next batch were not spent on it."""
        f, g, b = self._before
        self._before = forward_s, backward_s, samples
        usual_s = f * max(samples / b, backward_s / g) if f and g and b else forward_s
        return forward_s - usual_s if forward_s > _FAR * usual_s else 0.0
