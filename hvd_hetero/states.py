"""What states that were saved have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["require_version"]


def require_version(state: Mapping[str, Any], of: str, version: int) -> None:
    """Refuse a state that another version of this program has written."""
    if state.get("version") != version:
        raise ValueError(
            f"the state of {of} has version {state.get('version')}, and this program reads version {version}; resume "
            "with the version of hvd-hetero that saved it, or begin anew with the model's parameters alone"
        )
