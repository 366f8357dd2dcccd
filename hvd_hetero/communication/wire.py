"""The one wire: whatever travels between ranks goes through it, and it alone knows what carries it.

Every call has a name, the same on all ranks; a name is free again once its result was fetched on all ranks. On some
wires the calls of the ranks find each other by these names, and may start in any order. On others they are paired in
the order in which each rank starts them (``communication.lines``). So whoever uses a wire keeps to this:

- A thread that waits for each result before it goes on makes its calls in the same order on all ranks anyway. Otherwise
  two ranks would wait in two calls for each other, on any wire.
- Calls that start while gradients arise may come in another order on each rank, and at other times than the calls of
  the first kind. They have a `Line` of their own, with one call in a round, or with an order that is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from hvd_hetero.communication.buckets import Limits

__all__ = ["Handle", "Line", "SharesSignals", "Signals", "TensorWire", "Wire"]

Tensor = TypeVar("Tensor")
Handle = Any
"""What stands for something under way. Each wire has a kind of its own."""


class Signals(Protocol):
    """How ranks tell one another, while they compute, that one has finished: by connections, or as threads."""

    def raise_signal(self, round: int) -> None:
        """Tell the others that this rank has finished the round."""

    def raised(self, round: int) -> bool:
        """Return whether any rank has finished the round."""

    def close(self) -> None:
        """Let go of what is open."""


class SharesSignals(Protocol):
    """What ranks that are threads of one process have in common (``communication.threads.Crew``)."""

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
        """What ``result`` and ``wait`` raise if another rank has failed or is gone."""

    @property
    def waits_in(self) -> tuple[str, ...]:
        """Beginnings of the names of modules in which a thread waits for other ranks (``hvd_hetero.watchdog``)."""

    @property
    def gives_up_s(self) -> float:
        """Seconds after which a call fails for which another rank does not come; infinite if it waits for ever."""

    @property
    def cannot_sum(self) -> tuple[Any, ...]:
        """Types of numbers that it cannot sum."""

    @property
    def limits(self) -> Limits:
        """How large buckets of gradients are at best."""

    @property
    def crew(self) -> SharesSignals | None:
        """What ranks that are threads of one process share; None if each is a process."""

    def start_sum(self, tensor: Tensor, name: str) -> Handle:
        """Sum a tensor over all ranks, in place. Do not touch it before the result is there."""

    def start_sums(self, tensors: list[Tensor], name: str) -> Handle:
        """Sum each of these tensors over all ranks. The result is a sequence of new tensors."""

    def start_gather(self, rows: Tensor, name: str) -> Handle:
        """Lay the rows of all ranks end to end. Ranks may have different numbers of rows, also none."""

    def start_exchange(self, numbers: Tensor, splits: Sequence[int], name: str) -> Handle:
        """Send the first ``splits[0]`` numbers to rank 0, the next to rank 1, and so on.

        From each rank comes as much as goes to it. The result is two tensors: what came, in order of rank, and how many
        numbers came from each.
        """

    def start_broadcast(self, tensor: Tensor, name: str) -> Handle:
        """Give all ranks what rank 0's tensor holds, in place."""

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

        It takes ``expected_s``, as far as is known, the last ``transfer_s`` of it to move data; ``imminent`` says
        whether the end is near.
        """

    def listen(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` from now on whenever this process starts a call, also one of the user's own."""

    def line(self) -> Line[Tensor]:
        """Return a line beside this wire; a collective call. It is free again once no one holds it."""


class Line(TensorWire[Tensor], Protocol[Tensor]):
    """A wire whose calls have an order among themselves, and none relative to those of other lines."""

    def in_order(self, names: Sequence[str]) -> None:
        """Each rank makes exactly these calls in the next round, however they come; they start in this order.

        Call it between rounds, alike on all ranks, and before each round. Do not wait for a result before all of them
        were made.
        """

    def change_order(self, names: Sequence[str]) -> None:
        """In the rest of the round at hand, make only those of ``names`` that are still to come, and the new ones.

        What is left out must have started on no rank.
        """
