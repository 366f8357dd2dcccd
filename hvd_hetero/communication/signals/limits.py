"""How long the channel waits and how much it holds, for those who do not know its key."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """All arbitrary, with room on both sides: a handshake takes three flights, so a millisecond on most networks.

    Where more than ``strangers`` connections have not yet proved who they are, the oldest makes room for the newest:
    whoever holds many silent ones open thus keeps nobody out, since a peer speaks as soon as it is connected.
    """

    handshake_s: float = 5.0  # from connecting or being connected to until the other end has proved to hold the key
    strangers: int = 64  # connections, accepted and not yet authenticated
    first_retry_s: float = 0.05  # doubled with every vain pass over the addresses of a peer
    last_retry_s: float = 5.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{field.name} must be positive and finite, got {value!r}")
