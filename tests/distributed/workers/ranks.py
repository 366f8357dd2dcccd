"""What workers ask of the ranks that they run on, by Horovod's names: of Horovod, or of torch.distributed.

``HVD_HETERO_TEST_WIRE`` says which. Ranks of torch.distributed are started by horovodrun, too, for a launch by torchrun
imports PyTorch once more; Horovod is not initialised there, and need not be installed: then torchrun starts them.

With ``HVD_HETERO_TEST_DEVICE=cuda`` models, data and gradients of these ranks are on that device, which they share, and
``HVD_HETERO_TEST_BACKEND`` is what torch.distributed moves them by.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

from hvd_hetero.testing.rank import RUN_DIR

__all__ = ["DEVICE", "OVER_TORCH", "hvd"]

OVER_TORCH = os.environ.get("HVD_HETERO_TEST_WIRE") == "torch.distributed"
DEVICE = os.environ.get("HVD_HETERO_TEST_DEVICE", "cpu")
BACKEND = os.environ.get("HVD_HETERO_TEST_BACKEND", "gloo")
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)


class ProcessGroup:
    """Horovod's functions, as far as workers call them, over torch.distributed."""

    Sum, Average = "sum", "average"
    Compression = SimpleNamespace(none=None, fp16=torch.float16)

    def init(self) -> None:
        rank, size = (
            int(os.environ.get(f"HOROVOD_{horovods}", os.environ.get(torchruns, "")))
            for horovods, torchruns in (("RANK", "RANK"), ("SIZE", "WORLD_SIZE"))
        )
        # Agents of torchrun have agreed on a store, which ranks on other hosts reach.
        store = "env://" if "TORCHELASTIC_RUN_ID" in os.environ else f"file://{os.environ[RUN_DIR]}/store"
        torch.distributed.init_process_group(BACKEND, init_method=store, rank=rank, world_size=size)

    def shutdown(self) -> None:
        torch.distributed.destroy_process_group()

    def rank(self) -> int:
        return torch.distributed.get_rank()

    def size(self) -> int:
        return torch.distributed.get_world_size()

    def allgather_object(self, obj: Any, name: str | None = None) -> list[Any]:
        everywhere: list[Any] = [None] * self.size()
        torch.distributed.all_gather_object(everywhere, obj)
        return everywhere

    def allgather(self, tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
        return torch.cat(self.allgather_object(tensor))

    def allreduce(self, tensor: torch.Tensor, name: str | None = None, op: str = Average) -> torch.Tensor:
        torch.distributed.all_reduce(total := tensor.clone())
        return total / self.size() if op == self.Average else total


if OVER_TORCH:
    hvd: Any = ProcessGroup()
else:
    import horovod.torch as hvd
