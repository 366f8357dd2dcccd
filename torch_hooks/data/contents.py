"""What a data set holds in memory, read without running its ``__getitem__``.

That function may draw random numbers, count its calls, or open a file that worker processes must open themselves. So
data are compared if their tensors are in memory. Of other data sets the attributes are compared: file names, labels,
indices, offsets. A difference there may be meant, so it is a warning.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Sequence, Sized
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from hvd_hetero.data.same_data import Row, Shown, ranks_apart, show
from hvd_hetero.errors import PlanMismatchError

logger = logging.getLogger(__name__)

_OF_TORCHVISION = ("data", "targets")
_DEEPEST = 3  # of data sets that hold others
_FOLDERS = re.compile(r'"[^"]*/')
Told: TypeAlias = tuple[Shown, Shown]
"""The samples of a rank, and the attributes of its data set, as numbers to compare."""


def require_alike(dataset: Any, gather: Callable[[Told], Sequence[Told]]) -> None:
    """Raise unless all ranks hold the same samples, as far as compared; warn if attributes of a data set differ.

    Parts of equal length, cut by hand, would be cut again by the plan. ``gather`` collects what all ranks show.
    """
    length = len(dataset)
    samples, attributes = zip(
        *gather((show(length, columns_of(dataset)), show(length, attributes_of(dataset)))), strict=True
    )
    if ranks := ranks_apart(samples):
        raise PlanMismatchError(
            f"ranks {ranks} hold other samples than rank 0 at the same indices. Give every rank the whole dataset, "
            "alike: BalancedLoader shares it out. Seed what is drawn at random; where each rank can only read "
            "samples of its own, use an IterableDataset and stream='shard'. If they differ as they should "
            "(augmented beforehand, a cache that fills), check_data=False does not compare"
        )
    for name in attributes[0][1]:
        if ranks := ranks_apart([(n, {name: rows[name]} if name in rows else {}) for n, rows in attributes]):
            logger.warning(
                "%r of the dataset differs between rank 0 and ranks %s. If each rank holds a part, give every rank the "
                "whole dataset: BalancedLoader cuts it. If the difference is meant, check_data=False does not compare",
                name, ranks,
            )  # fmt: skip
            return


def attributes_of(dataset: Any, deepest: int = _DEEPEST) -> dict[str, Row]:
    """Return a function of an index for each attribute with whole numbers, or with a plain value for each sample."""
    rows: dict[str, Row] = {}
    held = {} if isinstance(dataset, IterableDataset) else getattr(dataset, "__dict__", {})
    for name, value in held.items():
        if isinstance(value, Dataset) and isinstance(value, Sized) and deepest:
            inner = attributes_of(value, deepest - 1).items()
            rows |= {f"{name}.{of}": _again(row, len(value)) for of, row in inner}
        elif isinstance(value, int) and not isinstance(value, bool) and "seed" not in name:  # of augmentation
            rows[name] = _again(_plain([value]), 1)
        elif _holds_samples(value, dataset):
            rows[name] = _row_of(value)
        elif isinstance(value, list | tuple | np.ndarray) or hasattr(value, "iloc"):
            values = getattr(value, "iloc", value)  # rows of a table of pandas
            if getattr(value, "ndim", 1) and len(value) == len(dataset):
                rows[name] = _plain(values)
    return rows


def _again(row: Row, length: int) -> Row:
    return lambda i: row(i % max(length, 1))


def _plain(values: Any) -> Row:
    """Return checksums of file names without folders, of numbers and of what is made of them; 0 for anything else."""

    def row(i: int) -> int:
        try:
            text = json.dumps(
                values[i], default=lambda each: each.tolist() if hasattr(each, "tolist") else os.fspath(each)
            )
        except (TypeError, ValueError):
            return 0
        return zlib.crc32(_FOLDERS.sub('"', text).encode())

    return row


def columns_of(dataset: Any) -> dict[str, Row]:
    """Return a function of an index for each column of data; for a ``Subset`` its indices, and the data at them."""
    if isinstance(dataset, Subset):
        indices = dataset.indices
        if not len(indices) or not isinstance(indices[0], int | np.integer | torch.Tensor):
            return {}  # keys of the user's own
        rows: dict[str, Row] = {"indices": lambda i: int(indices[i])}
        for name, row in columns_of(dataset.dataset).items():
            rows[f"dataset.{name}"] = _at(indices, row)
        return rows
    if isinstance(dataset, TensorDataset):
        held = {f"tensors[{number}]": tensor for number, tensor in enumerate(dataset.tensors)}
    else:
        held = {name: vars(dataset).get(name) for name in _OF_TORCHVISION} if hasattr(dataset, "__dict__") else {}
    return {name: _row_of(values) for name, values in held.items() if _holds_samples(values, dataset)}


def _at(indices: Sequence[int], row: Row) -> Row:
    return lambda i: row(int(indices[i]))


def _holds_samples(values: Any, dataset: Any) -> bool:
    """Return whether these are numbers, with as many rows as there are samples."""
    if isinstance(values, torch.Tensor):
        numbers = values.layout == torch.strided and not values.is_quantized and values.dim() > 0
    else:
        numbers = isinstance(values, np.ndarray) and values.dtype.kind in "fiub" and values.ndim > 0
    return numbers and isinstance(dataset, Sized) and len(values) == len(dataset)


def _row_of(values: torch.Tensor | np.ndarray[Any, Any]) -> Row:
    if isinstance(values, np.ndarray):
        return lambda i: values[i]

    def row(i: int) -> np.ndarray[Any, Any]:
        one = values[i].detach().reshape(-1).cpu()
        if one.is_complex():
            one = torch.view_as_real(one)
        return (one.double() if one.is_floating_point() else one).numpy()

    return row
