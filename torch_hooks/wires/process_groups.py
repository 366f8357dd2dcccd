"""The parts of torch.distributed that the wire uses beyond its public functions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any


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
