"""Where the computing thread looks, and what it writes to."""

from __future__ import annotations

__all__ = ["Board"]


class Board:
    """The numbers of rounds ended: as this rank says, as others say. One writer each at a time (`Loop` sees to it)."""

    __slots__ = ("heard", "own")

    def __init__(self) -> None:
        self.own = 0
        self.heard = 0
