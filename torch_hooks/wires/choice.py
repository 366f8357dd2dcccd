"""Which wire a training uses that is given none."""

from __future__ import annotations

import torch

from hvd_hetero.communication.threads import here
from hvd_hetero.communication.wire import TensorWire
from torch_hooks.wires.threads import TorchThreadWire

__all__ = ["TorchWire", "wire_here"]

TorchWire = TensorWire[torch.Tensor]


def wire_here() -> TorchWire:
    """Return the wire of this thread, if it is a rank, and Horovod's otherwise."""
    if (mine := here()) is not None:
        return TorchThreadWire(mine.crew, mine.rank)
    from torch_hooks.wires.horovod import HorovodWire  # needs Horovod, which ranks that are threads do not

    return HorovodWire()
