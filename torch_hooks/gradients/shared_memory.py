"""A check whether a gradient may be changed in place."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["shares_memory"]

# Not public, and without a public counterpart: how many tensors and Python objects use a storage.
_users: Callable[[int], int] = torch._C._storage_Use_Count
_OWN_USERS = 2  # the gradient, and the Python object by which we ask


def shares_memory(gradient: torch.Tensor) -> bool:
    """Return whether the numbers are not the gradient's alone, so that they must not be changed in place.

    A part of a larger tensor, as torch.cat of parameters leaves it, has a version that counts changes of all parts.
    And of ``x + bias.view(1, -1)`` with a single sample in x, the gradient of the bias is a view of the gradient of the
    sum, which the backward pass is still to use.
    """
    storage = gradient.untyped_storage()
    return storage.nbytes() > gradient.nbytes or _users(storage._cdata) > _OWN_USERS
