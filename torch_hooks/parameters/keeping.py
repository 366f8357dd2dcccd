"""Copies of states that are taken again and again: the memory of the copy before takes the next one.

A copy into existing memory costs a quarter of one into new memory, whose pages the system must provide first, and
there are never two copies at once.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


def copied(state: Any, former: Any = None) -> Any:
    """Return a copy of ``state`` (tensors, in dicts and lists, and other values), in ``former``'s memory if it fits.

    ``former`` is an earlier result, and must not be used afterwards.
    """
    return _copied(state, former, {})


def _copied(state: Any, former: Any, taken: dict[int, int]) -> Any:
    """Return a copy. ``taken``: for memory of ``former`` that was written to, the memory that it is a copy of."""
    if isinstance(state, torch.Tensor):
        return former.copy_(state) if _fits(state, former, taken) else copy.deepcopy(state)
    # A container that was in the former copy twice must be in the new state twice, too: else the second would overwrite
    # what the first has copied.
    if isinstance(state, dict | list) and taken.setdefault(id(former), id(state)) != id(state):
        return copy.deepcopy(state)
    if isinstance(state, dict) and type(former) is type(state) and list(former) == list(state):
        for key, value in state.items():
            former[key] = _copied(value, former[key], taken)
        return former
    if type(state) is list and type(former) is list and len(former) == len(state):
        former[:] = [_copied(value, before, taken) for value, before in zip(state, former, strict=True)]
        return former
    return copy.deepcopy(state)


def _fits(state: torch.Tensor, former: Any, taken: dict[int, int]) -> bool:
    fits = (
        type(former) is torch.Tensor and type(state) is torch.Tensor
        and state.layout is former.layout is torch.strided
        and (state.shape, state.stride(), state.storage_offset(), state.dtype, state.device)
        == (former.shape, former.stride(), former.storage_offset(), former.dtype, former.device)
        and all(step or size < 2 for step, size in zip(state.stride(), state.shape, strict=True))  # not expanded
        and not (state.requires_grad or former.requires_grad or former.is_inference())
    )  # fmt: skip
    if not fits:
        return False
    # Two tensors of a copy may share memory, because their originals did. It serves again only if the new ones do, too.
    original = state.untyped_storage().data_ptr()
    return taken.setdefault(former.untyped_storage().data_ptr(), original) == original
