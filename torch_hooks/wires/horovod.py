"""Horovod's wire: the one file that calls ``horovod.torch``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_hetero.communication.objects import all_objects, object_of
from hvd_hetero.watchdog.patience import horovod_timeout_s
from torch_hooks.wires.waiting import wait


class HorovodWire:
    """Collectives of Horovod over all ranks (``hvd_hetero.communication.wire.TensorWire``). A handle is a number."""

    failure = HorovodInternalError
    waits_in = ("horovod.", "torch_hooks.wires.waiting")
    cannot_sum = (torch.bfloat16,)
    thread_group = None

    def __init__(self) -> None:
        if not hvd.is_initialized():
            raise ValueError("Horovod is not initialised; call hvd.init() before LoadBalance(…)")

    @property
    def collective_timeout_s(self) -> float:
        """Seconds after which a call fails if another rank does not come."""
        return horovod_timeout_s()

    @property
    def rank(self) -> int:
        """The number of this rank, which an elastic reset may change."""
        return int(hvd.rank())

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(hvd.size())

    def broadcast_object(self, obj: Any, root_rank: int, name: str) -> Any:
        """Return rank ``root_rank``'s object, on every rank."""
        return object_of(obj, self.rank == root_rank, name, _laid_end_to_end)

    def allgather_object(self, obj: Any, name: str) -> Sequence[Any]:
        """Return every rank's object, in order of rank."""
        return all_objects(obj, name, self.size, _laid_end_to_end)

    def start_sum(self, tensor: torch.Tensor, name: str) -> int:
        """Sum a tensor over all ranks, in place."""
        # Never scaled by Horovod: its factors must be equal on all ranks, and one that changes misses its cache.
        handle: int = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
        return handle

    def start_gather(self, rows: torch.Tensor, name: str) -> int:
        """Lay the rows of all ranks end to end; the result has no shape if no rank has sent any."""
        handle: int = hvd.allgather_async(rows, name=name)
        return handle

    def start_exchange(self, numbers: torch.Tensor, splits: Sequence[int], name: str) -> int:
        """Send the first ``splits[0]`` numbers to rank 0, and so on; return what came, and how much from each."""
        # Splits may change from call to call, but Horovod caches by the size of what is sent.
        handle: int = hvd.alltoall_async(
            numbers, splits=torch.tensor(splits, dtype=torch.int32, device="cpu"), name=name
        )
        return handle

    def start_broadcast(self, tensor: torch.Tensor, name: str) -> int:
        """Give all ranks the numbers of rank 0's tensor, in place."""
        handle: int = hvd.broadcast_async_(tensor, root_rank=0, name=name)
        return handle

    def done(self, handle: int) -> bool:
        """Return whether the result is there."""
        there: bool = hvd.poll(handle)
        return there

    def result(self, handle: int) -> Any:
        """Return the result. Horovod spins on the processor until it is there."""
        return hvd.synchronize(handle)

    def wait(
        self,
        handle: int,
        expected_s: float = math.nan,
        transfer_s: float = math.nan,
        imminent: Callable[[], bool] | None = None,
    ) -> Any:
        """Return the result, asleep while others compute and awake while the data moves."""
        wait(partial(hvd.poll, handle), expected_s, transfer_s, imminent)
        return hvd.synchronize(handle)

    def new_group(self) -> Self:
        """Return this wire, whose calls are paired by name."""
        return self


def _laid_end_to_end(name: str, mine: memoryview) -> memoryview:
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    # Horovod makes room in the result from another thread, which is not in this one's inference mode.
    with torch.inference_mode(False):
        sent = torch.frombuffer(mine, dtype=torch.uint8) if mine else nothing
        return memoryview(hvd.allgather(sent, name=name).numpy())
