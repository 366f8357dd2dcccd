"""The data that a dataset holds in memory, compared over the ranks; of other datasets only the length is."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from hvd_hetero.data.same_data import DrawnRows, Rows, drawn_rows, ranks_with_other_data
from hvd_hetero.errors import PlanMismatchError

_OF_TORCHVISION = ("data", "targets")


def shown(dataset: Any) -> DrawnRows:
    """Return a few samples of what this rank's dataset holds."""
    return drawn_rows(len(dataset), partial(rows_at, dataset=dataset))


def require_alike(everywhere: Sequence[DrawnRows]) -> None:
    """Raise unless all ranks hold the same samples, as far as they have shown them."""
    # Parts of equal length that a user has cut by hand would be cut again by the plan.
    if ranks := ranks_with_other_data(everywhere):
        raise PlanMismatchError(
            f"ranks {ranks} hold other samples than rank 0 at the same indices. Give every rank the whole dataset, "
            "and seed what is drawn at random: BalancedLoader divides the samples. If each rank can only read "
            "samples of its own, use an IterableDataset and stream='shard'. If samples differ on purpose "
            "(augmented beforehand, a cache that fills), set check_data=False"
        )


def rows_at(indices: Sequence[int], dataset: Any) -> Rows:
    """Return what each column of data holds at these indices; of a ``Subset`` where these rows are, too."""
    # Not by __getitem__, which may draw random numbers, count its calls, or open a file that worker processes must open
    # themselves.
    if isinstance(dataset, Subset):
        inside = [dataset.indices[i] for i in indices]
        if not all(isinstance(i, int | np.integer | torch.Tensor) for i in inside):
            return {}  # keys of the user's own
        inside = list(map(int, inside))
        return {"indices": inside} | {f"in it, {name}": rows for name, rows in rows_at(inside, dataset.dataset).items()}
    if isinstance(dataset, TensorDataset):
        held = {f"tensors[{number}]": tensor for number, tensor in enumerate(dataset.tensors)}
    else:
        held = {name: vars(dataset).get(name) for name in _OF_TORCHVISION} if hasattr(dataset, "__dict__") else {}
    return {
        name: [_row(values[i]) for i in indices] for name, values in held.items() if _holds_samples(values, dataset)
    }


def _holds_samples(values: Any, dataset: Any) -> bool:
    """Return whether these are numbers, with as many rows as there are samples."""
    if isinstance(values, torch.Tensor):
        numbers = values.layout == torch.strided and not values.is_quantized and values.dim() > 0
    else:
        numbers = isinstance(values, np.ndarray) and values.dtype.kind in "fiub" and values.ndim > 0
    return numbers and isinstance(dataset, Sized) and len(values) == len(dataset)


def _row(values: Any) -> Any:
    if not isinstance(values, torch.Tensor):
        return values
    values = torch.view_as_real(values) if values.is_complex() else values
    return (values.double() if values.is_floating_point() else values).detach().cpu().numpy()
