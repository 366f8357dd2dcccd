"""Arguments that scripts bring along from elsewhere, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["LOAD_BALANCE", "OPTIMIZER", "refuse"]

OPTIMIZER = {
    "op": "leave it out: the gradient is the mean over the samples of all ranks; for hvd.Sum, multiply the loss by "
    "hvd.size()",
    "backward_passes_per_step": "leave it out and call step() for every batch: a round of several micro-batches is one "
    "update; LoadBalance(policy=BSP(max_micro_batch=…)) limits the size of each",
    "process_set": "leave it out: all ranks of the job train together",
    "gradient_predivide_factor": "leave it out: gradients are weighted before they are summed",
    "num_groups": "leave it out: gradients travel in buckets as it is",
    "groups": "leave it out: gradients travel in buckets as it is",
}
LOAD_BALANCE = {
    "batch_size": "write global_batch=batch_size * hvd.size(), the samples of all ranks together",
    "max_micro_batch": "give it to the policy: policy=BSP(max_micro_batch=…)",
    "process_set": "leave it out: all ranks of the job train together",
}


def refuse(given: Mapping[str, Any], instead: Mapping[str, str], who: str) -> None:
    """Raise if there are any, with what to write instead of those that are known."""
    for name, value in given.items():
        way_out = instead.get(name, f"see help({who}) for those that it has")
        raise TypeError(f"{who} has no argument {name}={value!r}; {way_out}")
