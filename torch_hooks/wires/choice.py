"""Which wire a training uses that is given none."""

from __future__ import annotations

import sys

import torch

from hvd_hetero.communication.threads import here
from hvd_hetero.communication.wire import Line, TensorWire
from torch_hooks.wires.threads import TorchThreadWire

__all__ = ["TorchLine", "TorchWire", "over_process_groups", "wire_here"]

TorchWire = TensorWire[torch.Tensor]
TorchLine = Line[torch.Tensor]


def wire_here() -> TorchWire:
    """Return the wire of this thread, if it is a rank; else that of Horovod or of torch.distributed, whichever runs.

    Where both are initialised, it is Horovod's. Neither is imported before it is used, since it need not be there.
    """
    if (mine := here()) is not None:
        return TorchThreadWire(mine.crew, mine.rank)
    if _horovod_runs():
        from torch_hooks.wires.horovod import HorovodWire

        return HorovodWire()
    if over_process_groups():
        from torch_hooks.wires.torch_distributed import wire_of_world

        return wire_of_world()
    raise ValueError(
        "neither Horovod nor torch.distributed is initialised; before LoadBalance(…), call hvd.init() under "
        "horovodrun, or torch.distributed.init_process_group() under torchrun"
    )


def over_process_groups() -> bool:
    """Return whether the ranks are processes that talk by torch.distributed, and Horovod is not initialised."""
    runs = torch.distributed.is_available() and torch.distributed.is_initialized()
    return runs and here() is None and not _horovod_runs()


def _horovod_runs() -> bool:
    horovod = sys.modules.get("horovod.torch")
    return horovod is not None and bool(horovod.is_initialized())
