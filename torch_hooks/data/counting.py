r"""What the mean loss of a batch is over, if not its samples: tokens, or what ``collate_fn`` has left of them.

A gradient counts w / W in the round's, W the sum over all ranks and micro-batches. The number of tokens that are no
padding is known only when the batch is. Nor does a collate function's result show how many samples it has left out:
the first dimension of its tensors is the number of samples in most, the number of rows in sequence packing, time in
others. So the user gives it (``weight_of``). Without, what is certainly wrong is an error, and what only looks so is a
warning, once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import default_collate

logger = logging.getLogger(__name__)

_WAY_OUT = (
    "give BalancedLoader weight_of=…, a function that returns what the mean loss of a batch is over, such as "
    "weight_of=lambda batch: len(batch[0])"
)


class Collate:
    """Collates samples; none make no batch. A class, so that it reaches worker processes however they start.

    ``counted``: the user says what a batch counts.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] | None, *, counted: bool) -> None:
        self._collate = collate or default_collate
        self._checks = collate is not None and not counted

    def __call__(self, samples: list[Any]) -> Any:
        """Return one batch of the samples."""
        if not len(samples):
            return None
        if self._checks and (missing := sum(sample is None for sample in samples)):
            raise ValueError(
                f"collate_fn must use all samples that it is given, since gradients are weighted by their number, and "
                f"{missing} of {len(samples)} are None here; {_WAY_OUT}, or let the dataset return another sample "
                "in the place of one that it cannot read"
            )
        return self._collate(samples)


class Weights:
    """Says what a batch's mean gradient counts: its samples, or what the user's function returns."""

    def __init__(self, weight_of: Callable[[Any], float] | None, *, own_collate: bool) -> None:
        self._weight_of = weight_of
        self.given = weight_of is not None
        """True: the user says what a batch counts."""
        self._looks = own_collate and weight_of is None

    def __call__(self, batch: Any, samples: int) -> float | None:
        """Return the weight of a batch of so many samples; None: its samples."""
        if self._weight_of is None:
            if self._looks and (rows := _rows(batch, samples)):
                self._looks = False
                logger.warning(
                    "collate_fn was given %d samples and has returned tensors of %d rows: if it leaves samples out, "
                    "gradients are weighted wrongly; %s. If it packs several samples in a row, all is well",
                    samples, rows, _WAY_OUT,
                )  # fmt: skip
            return None
        try:
            weight = float(self._weight_of(batch))
        except Exception as error:
            raise ValueError(
                f"weight_of failed for a batch of {samples} samples, {type(error).__name__}: {error}; {_WAY_OUT}"
            ) from error
        if not 0.0 <= weight < math.inf:
            raise ValueError(
                f"weight_of must be finite and at least 0, got {weight} for a batch of {samples} samples; {_WAY_OUT}"
            )
        return weight


def _rows(batch: Any, given: int) -> int:
    """Return the first dimension that all tensors have in common, if it is smaller than the samples; else 0.

    One row alone is a packed sequence.
    """
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in _tensors(batch)}
    return next(iter(rows)) if len(rows) == 1 and 1 < min(rows) < given else 0


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)
