"""How large micro-batches may be once one has not fitted into memory."""

from __future__ import annotations

__all__ = ["HEADROOM", "limit_after"]

HEADROOM = 0.1
"""How far a limit stays below what failed: what fits once may not fit in fragmented memory (arbitrary)."""


def limit_after(failed: int, limit: int) -> int:
    """The largest micro-batch allowed after one of ``failed`` samples; ``limit`` is the limit so far, 0 for none."""
    return max(1, min(int(failed * (1 - HEADROOM)), failed - 1, limit or failed))
