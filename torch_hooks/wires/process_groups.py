"""The parts of torch.distributed that the wire uses beyond its public functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

__all__ = ["listen", "tell", "timeout_of", "with_cpu"]

_NO_COLLECTIVES = frozenset({"get_rank", "get_world_size", "get_backend", "get_backend_config", "_set_pg_timeout"})
_to_tell: list[Callable[[], None]] = []


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


def tell() -> None:
    """Call all listeners: a collective begins in this process."""
    for each in _to_tell:
        each()


def listen(to: Callable[[], None]) -> None:
    """Have ``to`` called for each ``tell``, and for the collectives of torch.distributed's functions.

    Each of these functions first asks whether this rank is in its group. That question is replaced, so all are heard,
    even if a program has imported one by its name.
    """
    _to_tell[:] = [to]
    asks = getattr(c10d, "_rank_not_in_group", None)  # not public: without it, only our own calls are heard
    if asks is None or hasattr(asks, "tells"):
        return

    def asks_and_tells(group: Any) -> Any:
        if sys._getframe(1).f_code.co_name not in _NO_COLLECTIVES:
            tell()
        return asks(group)

    asks_and_tells.tells = True  # type: ignore[attr-defined]
    c10d._rank_not_in_group = asks_and_tells
