"""torch.distributed's wire: collectives of process groups, of Gloo for tensors on CPUs and of NCCL for those on GPUs.

**Order takes the place of names.** A process group pairs the k-th collective of one rank with the k-th of every other
one, so all ranks must start the collectives of a group in one order. The training thread makes every call, in the
program's order. A hook of autograd on another thread is no exception: the training thread waits inside ``backward()``
meanwhile. The sums of a round have a separate process group for each optimizer, a *line*.

It has run with Gloo, and with NCCL on a GPU that two and three ranks share (``docs/gpu.md``).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hvd_hetero.errors import HeteroError, PeerLostError, RoundStateError
from hvd_hetero.rounds import checksum


@contextmanager
def _peers_may_be_lost(name: str) -> Iterator[None]:
    """Translate the plain RuntimeErrors of torch.distributed's work for one call; wrap nothing else."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(
            f"{name!r} has failed: another rank has failed, has made another call, or has not come within the "
            f"timeout of init_process_group. Look at its log. torch.distributed says: {error}"
        ) from error


@dataclass(slots=True)
class Call:
    """One call under way: the works of its collectives."""

    name: str
    result: Callable[[], Any]
    works: Sequence[Any] = ()


def _alive(group: Any) -> Any:
    if group is None:
        raise RoundStateError(
            "the process group of this LoadBalance has been destroyed; make LoadBalance, loader and optimizer again "
            "after init_process_group()"
        )
    return group


class _Track:
    """A process group, and how many calls were started on it here."""

    def __init__(self, group: Any) -> None:
        # Weakly: torch.distributed keeps groups until they are destroyed. One that outlived that in garbage would end
        # a process where the collector finds it in a fork, such as a loader's worker: Gloo's destructor joins a thread
        # that is not there.
        self._held = weakref.ref(group)
        self.started = 0
        self.held_by: Callable[[], _Group | None] = lambda: None

    @property
    def group(self) -> Any:
        """The process group."""
        return _alive(self._held())


class _Group:
    """Collectives of one process group (``hvd_hetero.communication.wire.TensorWire``)."""

    failure = PeerLostError
    waits_in = (
        "torch.distributed.distributed_c10d", "torch.distributed._functional_collectives",
        "torch_hooks.wires.torch_distributed",
    )  # fmt: skip
    cannot_sum = ()
    thread_group = None

    def __init__(self, wire: ProcessGroupWire | None, track: _Track) -> None:
        self._made_by = wire  # None: this is the wire itself
        self._track = track
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        track.held_by = weakref.ref(self)

    @property
    def _group(self) -> Any:
        return self._track.group

    @property
    def collective_timeout_s(self) -> float:
        """Seconds after which a call fails if another rank does not come: the group's timeout."""
        timeout = timeout_of(self._group)
        return math.inf if timeout is None else timeout.total_seconds()

    def broadcast_object(self, obj: Any, root_rank: int, name: str) -> Any:
        """Return rank ``root_rank``'s object, on every rank."""
        objects = [obj]
        root = dist.get_global_rank(self._group, root_rank)
        with _peers_may_be_lost(name):
            dist.broadcast_object_list(objects, root, group=self._group)
        return objects[0]

    def allgather_object(self, obj: Any, name: str) -> Sequence[Any]:
        """Return every rank's object, in order of rank."""
        objects: list[Any] = [None] * self.size
        with _peers_may_be_lost(name):
            dist.all_gather_object(objects, obj, group=self._group)
        return objects

    def start_sum(self, tensor: torch.Tensor, name: str) -> Call:
        """Sum a tensor over all ranks, in place."""
        return self._start(Call(name, lambda: tensor), lambda: [self._sum(tensor)])

    def start_gather(self, rows: torch.Tensor, name: str) -> Call:
        """Lay the rows of all ranks end to end."""
        kind = checksum(f"{rows.dtype} {tuple(rows.shape[1:])}".encode())
        header = torch.tensor([len(rows), kind], device=rows.device)

        def gather(mine: torch.Tensor) -> tuple[list[torch.Tensor], Callable[[], list[Any]]]:
            received = [torch.empty_like(mine) for _ in range(self.size)]
            return received, lambda: [dist.all_gather(received, mine, group=self._group, async_op=True)]

        def end_to_end() -> torch.Tensor:
            counts, kinds = zip(*(each.tolist() for each in headers), strict=True)
            if len(set(kinds)) > 1:
                raise HeteroError(
                    f"the ranks do not agree on {name!r}: rows of different types or shapes, here {rows.dtype} "
                    f"{tuple(rows.shape[1:])}; give it the same on every rank"
                )
            # The numbers of rows have come, so each rank sends as many rows now as the one that has most.
            padded = rows.new_zeros(max(counts), *rows.shape[1:])
            padded[: len(rows)] = rows.detach()
            # As bytes, so any type will do.
            parts, again = gather(padded.reshape(-1).view(torch.uint8))
            if padded.numel():
                self._await(self._start(Call(name, lambda: parts), again))
            whole = [part.view(rows.dtype).view(padded.shape) for part in parts]
            return torch.cat([each[:count] for each, count in zip(whole, counts, strict=True)])

        headers, begin = gather(header)
        return self._start(Call(name, end_to_end), begin)

    def start_exchange(self, numbers: torch.Tensor, splits: Sequence[int], name: str) -> Call:
        """Send the first ``splits[0]`` numbers to rank 0, and so on; as much comes back from each."""
        splits = list(splits)
        numbers = numbers.detach()
        received = torch.empty_like(numbers)

        def begin() -> list[Any]:
            return [dist.all_to_all_single(received, numbers, splits, splits, group=self._group, async_op=True)]

        return self._start(Call(name, lambda: (received, torch.tensor(splits, device="cpu"))), begin)

    def start_broadcast(self, tensor: torch.Tensor, name: str) -> Call:
        """Give all ranks the numbers of rank 0's tensor, in place."""
        root = dist.get_global_rank(self._group, 0)
        call = Call(name, lambda: tensor)
        return self._start(call, lambda: [dist.broadcast(tensor.detach(), root, group=self._group, async_op=True)])

    def done(self, handle: Call) -> bool:
        """Return whether the result is there; of a gather, the numbers of rows."""
        return all(work.is_completed() for work in handle.works)

    def result(self, handle: Call) -> Any:
        """Return the result. A thread that waits is asleep."""
        # NCCL's wait() only queues a wait in the device's stream. The host goes on, so that it can queue the work that
        # follows the sums.
        self._await(handle)
        return handle.result()

    def wait(
        self,
        handle: Call,
        expected_s: float = math.nan,
        transfer_s: float = math.nan,
        imminent: Callable[[], bool] | None = None,
    ) -> Any:
        """Return the result. Gloo's own threads move the data and wake this one, so nothing need be expected."""
        return self.result(handle)

    def new_group(self) -> _Group:
        """Return another group of the same ranks."""
        assert self._made_by is not None, "else this is the wire, which makes lines itself"
        return self._made_by.new_group()

    def _start(self, call: Call, begin: Callable[[], list[Any]]) -> Call:
        with _peers_may_be_lost(call.name):
            call.works = begin()
        self._track.started += 1
        return call

    def _sum(self, tensor: torch.Tensor) -> Any:
        # Not detach(), which shares the version: on GPUs Gloo copies the sum back, and what a wire writes is no change
        # by the loop's body.
        return self._group.allreduce([tensor.data])

    def _await(self, call: Call) -> None:
        with _peers_may_be_lost(call.name):
            for work in call.works:
                work.wait()


class ProcessGroupWire(_Group):
    """The ranks of a process group, by default all; a collective call. For ``LoadBalance(wire=…)``.

    It makes its own groups, with the backends and the timeout of the given one, so no order is needed
    between its collectives and yours: one for itself, and one for each optimizer that is alive. Use one such object in
    one thread.
    """

    def __init__(self, group: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "torch.distributed has no process group; call torch.distributed.init_process_group() in each process "
                "that torchrun starts"
            )
        group = c10d._get_default_group() if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group must be a process group that this rank is in, got {group!r}; pass what "
                "torch.distributed.new_group() returned, on its ranks alone"
            )
        self._of = weakref.ref(group)
        self._tracks: list[_Track] = []
        super().__init__(None, _Track(self._new_group()))

    @property
    def of(self) -> Any:
        """The process group that this wire is for; None: it has been destroyed."""
        return self._of()

    def new_group(self) -> _Group:
        """Return another group of the same ranks: one that no rank uses any more, if there is one, or a new one.

        Ranks may let go of a group at different times. One is free if it is free on all ranks, and all have started as
        many calls on it.
        """
        # A loop's body may make calls of its own, and all ranks meet in the table whatever their state: it must not
        # wait for other calls, nor be taken for one. Agreeing on the order by names, as Horovod does, would cost each
        # call a round trip. Groups of NCCL may run at once if their kernels find room together on the device.
        mine = [track.started if track.held_by() is None else None for track in self._tracks]
        everywhere = self.allgather_object(mine, name="hetero.lines")
        for track, counts in zip(self._tracks, zip(*everywhere, strict=True), strict=True):
            if counts[0] is not None and len(set(counts)) == 1:
                return _Group(self, track)
        self._tracks.append(_Track(self._new_group()))
        return _Group(self, self._tracks[-1])

    def _new_group(self) -> Any:
        of = _alive(self.of)
        return dist.new_group(
            dist.get_process_group_ranks(of),
            timeout=timeout_of(of),
            backend=with_cpu(dist.get_backend_config(of)),
            use_local_synchronization=of is not c10d._get_default_group(),
        )


_world: ProcessGroupWire | None = None


def wire_of_world() -> ProcessGroupWire:
    """Return the wire of all ranks, the same object as long as their process group is the same."""
    global _world  # noqa: PLW0603 - as torch.distributed keeps its own
    if _world is None or not dist.is_initialized() or _world.of is not c10d._get_default_group():
        _world = ProcessGroupWire()
    return _world


def with_cpu(backends: str) -> str:
    """Return the backends by device, with one for the CPU, where tables and objects are, wherever gradients are."""
    return backends if "cpu:" in backends else f"cpu:gloo,{backends}"


def timeout_of(group: Any) -> timedelta | None:
    """Return the timeout that a group was made with; None, for the default one, if its backends do not show it."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(timeout := getattr(options, "_timeout", None), timedelta):
            return timeout
    return None
