"""How the calls of all ranks are paired: by name, or by the order in which each rank starts them.

Horovod, and ranks that are threads, pair them by name (`FoundByName`). A process group of ``torch.distributed`` pairs
the k-th call of one rank with the k-th call of every other one, whatever they are. There, calls that may come in
different orders on different ranks take turns (`Turns`).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

from hvd_hetero.communication.bucket_sizes import Limits, usual
from hvd_hetero.errors import RoundStateError

__all__ = ["FoundByName", "Turns"]


class FoundByName:
    """A wire whose calls are paired by name: one line is enough, in any order."""

    @property
    def limits(self) -> Limits:
        """The best sizes of gradient buckets: as with Horovod."""
        return usual()

    @property
    def gives_up_s(self) -> float:
        """Seconds after which a call fails if another rank does not come: never."""
        return math.inf

    def line(self) -> Self:
        """Return this wire."""
        return self

    def in_order(self, names: Sequence[str]) -> None:
        """Do nothing."""

    def change_order(self, names: Sequence[str]) -> None:
        """Do nothing."""


class Turns:
    """Starts the calls of one line in the order that all ranks have agreed on; a call that comes early is held back.

    Let a round's agreed order be a_1 … a_n. Rank i calls each a_k once, in its own order, and a_k starts when
    a_1 … a_k have all been called there. So every rank starts a_1 … a_n. No rank waits for ever: a rank that has called
    all of them has started all of them, and it waits for no result before that.

    As long as no order is given, calls start as they come.
    """

    def __init__(self) -> None:
        self._order: Sequence[str] | None = None
        self._left: deque[str] = deque()
        self._held: dict[str, Callable[[], None]] = {}
        self._one_at_a_time = threading.Lock()  # backward passes of several devices are several threads

    @property
    def held(self) -> Sequence[str]:
        """Calls that have come and not started."""
        return tuple(self._held)

    def in_order(self, names: Sequence[str]) -> None:
        """Expect these calls in the next round, each of them once, and start them in this order."""
        with self._one_at_a_time:
            self._order, self._left = names, deque(names)
            self._held.clear()  # left over from a round that has failed

    def change_order(self, names: Sequence[str]) -> None:
        """Drop the calls that are not among ``names`` from the rest of this round; new ones follow the others.

        Let a rank have started a_1 … a_k; k may differ between ranks. A dropped call has come on no rank, so it is not
        among these. The rest of a_(k+1) … a_n and then the new calls follow. So every rank starts the old order without
        the dropped ones, and then the new calls, as ``names`` has them.
        """
        with self._one_at_a_time:
            known, wanted = set(self._order or ()), set(names)
            stay = [name for name in self._left if name in wanted or name in self._held]
            self._order = names
            self._left = deque([*stay, *(name for name in names if name not in known)])
            self._start_those_next()

    def come(self, name: str, start: Callable[[], None]) -> None:
        """Call ``start`` when it is this call's turn: now, or in a later ``come``."""
        if self._order is None:
            start()
            return
        with self._one_at_a_time:
            if name not in self._left or name in self._held:
                raise RoundStateError(
                    f"{name!r} has no turn: it is not among the calls of this round, or it came before; "
                    f"of the agreed calls, these are left: {', '.join(self._left) or 'none'}"
                )
            self._held[name] = start
            self._start_those_next()

    def _start_those_next(self) -> None:
        while self._left and (start := self._held.pop(self._left[0], None)) is not None:
            self._left.popleft()
            start()
