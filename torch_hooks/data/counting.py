r"""The number of samples in a batch, if ``collate_fn`` may leave some out.

A gradient is weighted by its samples: ``(S_i / S)`` of the round's mean, S_i the number that rank i has used. A collate
function that skips corrupt samples uses fewer than planned, and its result does not show it: the first dimension of
its tensors is the number of samples in most, the number of rows in sequence packing, time in others. So the user gives
it (``samples_of``). Without, what is certainly wrong is an error, and what only looks so is a warning, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import default_collate

from hvd_hetero.checks import integer

__all__ = ["Collate", "Counter"]

logger = logging.getLogger(__name__)

_WAY_OUT = (
    "give BalancedLoader samples_of=…, a function that says how many samples a batch holds, such as "
    "samples_of=lambda batch: len(batch[0])"
)


class Collate:
    """Collates samples; none make no batch. A class, so that it reaches worker processes however they start.

    ``counted``: the user says how many samples a batch holds.
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


class Counter:
    """Says how many samples a batch holds of those that ``collate_fn`` was given."""

    def __init__(self, samples_of: Callable[[Any], int] | None, *, own_collate: bool) -> None:
        self._samples_of = samples_of
        self.told = samples_of is not None
        """True: the user says how many samples a batch holds, because it may hold fewer than planned."""
        self._looks = own_collate and samples_of is None

    def __call__(self, batch: Any, given: int, *, required: bool) -> int:
        """Return a batch's samples. ``required``: other ranks would wait for ever if this one had nothing to do."""
        if self._samples_of is None:
            if self._looks and (rows := _rows(batch, given)):
                self._looks = False
                logger.warning(
                    "collate_fn was given %d samples and has returned tensors of %d rows: if it leaves samples out, "
                    "gradients are weighted wrongly; %s. If it packs several samples in a row, all is well",
                    given, rows, _WAY_OUT,
                )  # fmt: skip
            return given
        way_out = f"return how many of the {given} samples that collate_fn was given the batch holds"
        samples = integer("what samples_of returns", self._samples_of(batch), 0, given + 1, way_out=way_out)
        if required and not samples:
            raise ValueError(
                "what samples_of returns must be at least 1 with SyncBatchNorm, in which other ranks wait for this, "
                f"got 0 of {given} samples; let the dataset return another sample in the place of one that it "
                "cannot read, give each rank more samples, or use a normalisation that needs no other rank, such as "
                "GroupNorm"
            )
        return samples


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
