"""The limit of micro-batches after one has not fitted into memory."""

from __future__ import annotations

HEADROOM = 0.1
"""How far a limit stays below what failed: what fits once may not fit in fragmented memory (arbitrary)."""


def limit_after(failed: int, limit: int) -> int:
    """Return the largest micro-batch allowed after ``failed`` samples did not fit; ``limit`` is the former one or 0."""
    return max(1, min(int(failed * (1 - HEADROOM)), failed - 1, limit or failed))
