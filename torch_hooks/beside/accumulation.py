"""Defer the reduction of gradients to the last micro-batch of a round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


def reduced_later(model: Any, *, now: bool) -> AbstractContextManager[None]:
    """Return what keeps gradients of ``model`` on this rank meanwhile, unless they are to be reduced ``now``."""
    if hasattr(model, "set_requires_gradient_sync"):
        return nullcontext() if now else _sharded_later(model)
    if hasattr(model, "no_sync"):
        later: AbstractContextManager[None] = nullcontext() if now else model.no_sync()
        return later
    raise TypeError(
        f"model must be a DistributedDataParallel or sharded by fully_shard, got {type(model).__name__}; give "
        "hvd.DistributedOptimizer backward_passes_per_step instead"
    )


@contextmanager
def _sharded_later(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
