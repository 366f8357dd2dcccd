"""Arguments that scripts bring along from elsewhere, and what to write instead."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

OPTIMIZER = {
    "op": "leave it out: the gradient is the mean over the samples of all ranks; for hvd.Sum, multiply the loss by "
    "hvd.size()",
    "backward_passes_per_step": "leave it out and call step() for every batch: a round of several micro-batches is one "
    "update; LoadBalance(policy=BSP(max_micro_batch=…)) limits the size of each",
    "process_set": "leave it out: all ranks of the job train together",
    "gradient_predivide_factor": "leave it out: gradients are weighted before they are summed",
    "num_groups": "leave it out: gradients travel together as it is",
    "groups": "leave it out: gradients travel together as it is",
}
LOAD_BALANCE = {
    "batch_size": "write global_batch=batch_size * hvd.size(), the samples of all ranks together",
    "max_micro_batch": "give it to the policy: policy=BSP(max_micro_batch=…)",
    "process_set": "leave it out: all ranks of the job train together",
}


def refuse(given: Mapping[str, Any], instead: Mapping[str, str], who: str) -> None:
    """Raise if there are any, naming what to write instead of the known ones."""
    for name, value in given.items():
        way_out = instead.get(name, f"see help({who}) for those that it has")
        raise TypeError(f"{who} has no argument {name}={value!r}; {way_out}")


def refuse_synchronised(optimizer: torch.optim.Optimizer) -> None:
    """Raise if something else sums the gradients of this optimizer, or keeps its parameters or state in parts."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise TypeError(
            "optimizer is a ZeroRedundancyOptimizer, which keeps a part of the state on each rank; give the optimizer "
            "that it wraps, such as torch.optim.AdamW(model.parameters())"
        )
    for mark, kind in (("_fsdp_flattened", "FullyShardedDataParallel"), ("placements", "fully_shard or a DTensor")):
        if any(hasattr(p, mark) for p in parameters):
            raise TypeError(
                f"the optimizer's parameters are sharded by {kind}, and DistributedOptimizer sums whole gradients; "
                "give it a plain model that each rank holds whole, or train with FSDP alone"
            )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()  # a wrapper that is no longer used does no harm
        mine, ddp = set(map(id, parameters)), torch.nn.parallel.DistributedDataParallel
        wrapped = (each for each in gc.get_objects() if issubclass(type(each), ddp))  # it leaves no mark on a parameter
        if any(id(p) in mine for each in wrapped for p in each.parameters()):
            raise TypeError(
                "the optimizer's model is wrapped by DistributedDataParallel, and both would sum its gradients; leave "
                "DistributedDataParallel out, since DistributedOptimizer sums them"
            )
