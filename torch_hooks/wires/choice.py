"""The choice of a wire for a training without ``wire``."""

from __future__ import annotations

import sys

import torch

from hvd_hetero.communication.thread_wire import wire_of_this_thread
from hvd_hetero.communication.wire import TensorWire
from torch_hooks.wires.threads import TorchThreadWire

TorchWire = TensorWire[torch.Tensor]


def wire_here() -> TorchWire:
    """Return the wire of this thread, if it is a rank; else Horovod's or torch.distributed's, whichever runs."""
    # Neither is imported before it is used, since it need not be installed.
    if (mine := wire_of_this_thread()) is not None:
        return TorchThreadWire(mine.thread_group, mine.rank)
    if _horovod_runs():
        from torch_hooks.wires.horovod import HorovodWire

        wire = HorovodWire()
        # Both may be initialised: then Horovod's, if they have the same number of ranks.
        if _in_a_process_group() and wire.size != torch.distributed.get_world_size():
            raise ValueError(
                f"Horovod is initialised with {wire.size} rank(s) and torch.distributed with "
                f"{torch.distributed.get_world_size()}, so it is not clear which ranks train together; initialise "
                "only one of them, or give LoadBalance(wire=…)"
            )
        return wire
    if over_process_groups():
        from torch_hooks.wires.torch_distributed import wire_of_world

        return wire_of_world()
    raise ValueError(
        "neither Horovod nor torch.distributed is initialised; before LoadBalance(…), call hvd.init() under "
        "horovodrun, or torch.distributed.init_process_group() under torchrun"
    )


def over_process_groups() -> bool:
    """Return whether the ranks are processes that use torch.distributed, and Horovod is not initialised."""
    return _in_a_process_group() and wire_of_this_thread() is None and not _horovod_runs()


def _in_a_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _horovod_runs() -> bool:
    horovod = sys.modules.get("horovod.torch")
    return horovod is not None and bool(horovod.is_initialized())
