"""The choice of how the ranks of a training average, made for one optimizer."""

from __future__ import annotations

from typing import Any

import torch

from torch_hooks.gradients.allreduce import Allreduce
from torch_hooks.gradients.synchroniser import Synchroniser, Trained
from torch_hooks.parameters.averaging import LocalUpdates, NeighbourAverage
from torch_hooks.session import TorchSession


def synchroniser_of(
    session: TorchSession,
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    *,
    compression: Any,
    sparse_as_dense: bool,
) -> Synchroniser:
    """Return the synchroniser that averages gradients or parameters of this optimizer over the ranks."""
    trained = Trained(session.balancer, optimizer, names, session.prefix, session.wire)
    if session.mixing is None and not session.policy.updates_locally:
        return Allreduce(trained, compression=compression, sparse_as_dense=sparse_as_dense)
    if compression is not None or sparse_as_dense:
        raise ValueError(
            "compression and sparse_as_dense are for gradients that are summed over the ranks, and this training "
            "sends parameters instead; leave them out, or use sync='allreduce' with a policy without local updates"
        )
    return LocalUpdates(trained) if session.mixing is None else NeighbourAverage(trained, session.mixing)
