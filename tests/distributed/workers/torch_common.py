"""What the PyTorch workers of several tests need."""

from __future__ import annotations

from collections.abc import Callable

import torch
from ranks import hvd

from hvd_hetero.errors import HeteroError


def flat(model: torch.nn.Module) -> torch.Tensor:
    """All parameters, end to end."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def spread(model: torch.nn.Module) -> float:
    """How far apart the ranks' parameters are."""
    everywhere = hvd.allgather(flat(model)[None], name="spread")
    return float((everywhere - everywhere[0]).abs().max())


def refusal(provoke: Callable[[], object]) -> str:
    """What was raised, as a test reads it."""
    try:
        provoke()
    except (ValueError, TypeError, HeteroError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        # What a failed attempt has sent is done before this is, so the next attempt may use the same names.
        hvd.allreduce(torch.zeros(1), name="done")
    return "nothing was refused"
