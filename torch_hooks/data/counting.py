r"""What the mean loss of a batch is over, if not its samples: tokens, or what ``collate_fn`` has left of them.

A gradient counts w / W in the round's, W the sum over all ranks and micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from torch_hooks.data.late_costs import PartCosts

_GIVE_WEIGHT_OF = (
    "give weight_of=…, a function that returns what the mean loss of a batch is over, such as "
    "weight_of=lambda batch: len(batch[0])"
)


class Collate:
    """Collates samples; without samples there is no batch. ``counted``: ``weight_of`` gives the weight of a batch."""

    # A class, since a nested function would not reach worker processes that are spawned.
    def __init__(self, collate: Callable[[list[Any]], Any] | None, *, counted: bool) -> None:
        self._collate = collate or default_collate
        self._checks = collate is not None and not counted

    def __call__(self, samples: list[Any]) -> Any:
        """Return one batch of the samples."""
        if not len(samples):
            return None
        if isinstance(samples[0], PartCosts):
            return samples[0]
        # The result does not show how many samples were left out: the first dimension of its tensors is their number in
        # most, the number of rows in sequence packing, time in others. So the user has to say (weight_of).
        if self._checks and (missing := sum(sample is None for sample in samples)):
            raise ValueError(
                f"collate_fn must use all samples that it is given, since gradients are weighted by their number, and "
                f"{missing} of {len(samples)} are None here; {_GIVE_WEIGHT_OF}, or let the dataset return "
                "another sample in the place of one that it cannot read"
            )
        return self._collate(samples)


class Weights:
    """Returns the weight of a batch's mean gradient: its samples, or what the user's function returns."""

    def __init__(self, weight_of: Callable[[Any], float] | None) -> None:
        self._weight_of = weight_of
        self.given = weight_of is not None
        """True: weights are not samples."""

    def __call__(self, batch: Any, samples: int) -> float | None:
        """Return the weight of a batch of so many samples; None: its samples."""
        if self._weight_of is None:
            return None
        weight = float(self._weight_of(batch))
        if not 0.0 <= weight < math.inf:
            raise ValueError(
                f"weight_of must be finite and at least 0, got {weight} for a batch of {samples} samples; "
                f"{_GIVE_WEIGHT_OF}"
            )
        return weight
