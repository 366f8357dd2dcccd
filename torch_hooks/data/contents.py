"""The data that a dataset holds in memory, compared over the ranks; of other datasets only the length is."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from hvd_hetero.data.same_data import DrawnRows, Row, drawn_rows, ranks_with_other_data
from hvd_hetero.errors import PlanMismatchError

_OF_TORCHVISION = ("data", "targets")


def require_alike(dataset: Any, gather: Callable[[DrawnRows], Sequence[DrawnRows]]) -> None:
    """Raise unless all ranks hold the same samples, as far as compared. ``gather`` collects figures of all ranks."""
    # Parts of equal length that a user has cut by hand would be cut again by the plan.
    if ranks := ranks_with_other_data(gather(drawn_rows(len(dataset), columns_of(dataset)))):
        raise PlanMismatchError(
            f"ranks {ranks} hold other samples than rank 0 at the same indices. Give every rank the whole dataset, "
            "and seed what is drawn at random: BalancedLoader divides the samples. If each rank can only read "
            "samples of its own, use an IterableDataset and stream='shard'. If samples differ on purpose "
            "(augmented beforehand, a cache that fills), set check_data=False"
        )


def columns_of(dataset: Any) -> dict[str, Row]:
    """Return a function of an index for each column of data; for a ``Subset`` its indices, and the data at them."""
    # Not by __getitem__, which may draw random numbers, count its calls, or open a file that worker processes must open
    # themselves.
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
