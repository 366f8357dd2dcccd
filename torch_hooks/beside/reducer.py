"""What a reducer makes of the ranks' gradients, as Horovod's optimizer says itself."""

from __future__ import annotations

import sys
from typing import Literal

import torch

Reducer = Literal["mean", "sum"]


def is_horovods(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether Horovod reduces in this optimizer's ``step()``."""
    return hasattr(optimizer, "skip_synchronize")


def require_said(optimizer: torch.optim.Optimizer, said: Reducer) -> None:
    """Raise if Horovod's optimizer does something else than the user has said."""
    horovod = sys.modules["horovod.torch"]
    does = {horovod.Average: "mean", horovod.Sum: "sum"}.get(getattr(optimizer, "op", None), "something else")
    if does != said:
        raise ValueError(
            f"hvd.DistributedOptimizer makes the {does} of the ranks' gradients, and the loss was scaled for a "
            f"{said}; use LoadBalance(reducer='sum') with op=hvd.Sum, or leave both out"
        )
