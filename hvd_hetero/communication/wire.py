"""The interface of a wire: all that travels between ranks goes through it, and only it knows what carries it.

Every call has a name, the same on all ranks; a name is free again once its result was fetched on all ranks. On some
wires the calls of the ranks are paired by these names, and on others by the order in which each rank starts them. So
every rank makes its calls in the same order. Calls that may come before or behind these on some rank, as those of a
round do, have a separate `new_group`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

Tensor = TypeVar("Tensor")
Handle = Any
"""A wire's own object for a call under way."""


class Signals(Protocol):
    """Signals, to ranks that compute, that one has finished a round: packets, or memory of threads."""

    def raise_signal(self, round: int) -> None:
        """Signal to the others that this rank has finished the round."""

    def raised(self, round: int) -> bool:
        """Return whether any rank has finished the round."""


class SignalsOfThreads(Protocol):
    """The signals of ranks that are threads of one process (``communication.thread_wire.ThreadGroup``)."""

    def signals(self, number: int) -> Signals:
        """Return the signals of the training with this number, the same object for all ranks."""


class Wire(Protocol):
    """Carries objects while a training is set up: slow, and never used in a round."""

    @property
    def rank(self) -> int:
        """The number of this rank, counted from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def broadcast_object(self, obj: Any, root_rank: int, name: str) -> Any:
        """Return rank ``root_rank``'s object, on every rank."""

    def allgather_object(self, obj: Any, name: str) -> Sequence[Any]:
        """Return every rank's object, in order of rank."""


class TensorWire(Wire, Protocol[Tensor]):
    """Carries tensors, too. ``start_…`` returns at once, with a handle for ``result`` or ``wait``."""

    @property
    def failure(self) -> type[Exception]:
        """The exception that ``result`` and ``wait`` raise if another rank has failed or is gone."""

    @property
    def waits_in(self) -> tuple[str, ...]:
        """Beginnings of the names of modules in which a thread waits for other ranks (``hvd_hetero.watchdog``)."""

    @property
    def collective_timeout_s(self) -> float:
        """Seconds after which a call fails if another rank does not come; infinite if it waits for ever."""

    @property
    def cannot_sum(self) -> tuple[Any, ...]:
        """Types of numbers that it cannot sum."""

    @property
    def thread_group(self) -> SignalsOfThreads | None:
        """The shared state of ranks that are threads of one process; None if each is a process."""

    def start_sum(self, tensor: Tensor, name: str) -> Handle:
        """Sum a tensor over all ranks, in place. Do not touch it before the result is there."""

    def start_gather(self, rows: Tensor, name: str) -> Handle:
        """Lay the rows of all ranks end to end. Ranks may have different numbers of rows, also none."""

    def start_exchange(self, numbers: Tensor, splits: Sequence[int], name: str) -> Handle:
        """Send the first ``splits[0]`` numbers to rank 0, the next to rank 1, and so on.

        Each rank returns as many as it gets. The result is two tensors: what came, in order of rank, and how many
        numbers came from each.
        """

    def start_broadcast(self, tensor: Tensor, name: str) -> Handle:
        """Give all ranks the numbers of rank 0's tensor, in place."""

    def done(self, handle: Handle) -> bool:
        """Return whether the result is there, so that ``result`` does not wait."""

    def result(self, handle: Handle) -> Any:
        """Return the result, which is there or about to come: waiting may keep the processor busy."""

    def wait(
        self,
        handle: Handle,
        expected_s: float = ...,
        transfer_s: float = ...,
        imminent: Callable[[], bool] | None = None,
    ) -> Any:
        """Return the result, and leave the processor to others meanwhile.

        It takes ``expected_s``, as far as is known, and moves data in the last ``transfer_s`` of it; ``imminent``
        returns whether the end is near.
        """

    def new_group(self) -> TensorWire[Tensor]:
        """Return a wire of the same ranks whose calls have no order relative to this one's; a collective call.

        It is free again once no one holds it.
        """
