"""Orders that a sampler of the user draws, the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler


def drawn_by(sampler: Iterable[Any], seed: int, *, in_batches: bool) -> Callable[[int], npt.NDArray[np.int64]]:
    """Return a function that gives an epoch's order: the sampler's, drawn from the seed and the epoch's number."""
    name = "batch_sampler" if in_batches else "sampler"
    if isinstance(sampler, torch.utils.data.DistributedSampler) or getattr(sampler, "num_replicas", 1) != 1:
        raise ValueError(
            f"{name}={type(sampler).__name__}(…) gives each rank a part, and BalancedLoader shares the samples out "
            "itself; leave it out, with shuffle=True and a seed, or give the sampler that one process would have"
        )

    def draw(epoch: int) -> npt.NDArray[np.int64]:
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        # Samplers draw from their own generator, or from PyTorch's, Python's or NumPy's, so all of these are seeded.
        with random_state_kept():
            seed_all(int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]), _generators(sampler))
            drawn = list(sampler)
        if in_batches:
            drawn = [index for batch in drawn for index in batch]
        try:
            return np.array([index.__index__() for index in drawn], dtype=np.int64)
        except AttributeError:
            kind = next(type(index).__name__ for index in drawn if not hasattr(index, "__index__"))
            raise TypeError(
                f"{name} must give {'lists of ' if in_batches else ''}whole numbers, the indices of samples, got {kind}"
                f"{'; give one that yields lists as batch_sampler' if kind == 'list' else ''}"
            ) from None

    return draw


def _generators(sampler: Any) -> Iterator[torch.Generator]:
    """Yield the generators that a sampler draws from, and the generators of samplers in it."""
    for part in vars(sampler).values() if hasattr(sampler, "__dict__") else ():
        if isinstance(part, torch.Generator):
            yield part
        elif isinstance(part, Sampler):
            yield from _generators(part)


@contextmanager
def random_state_kept(devices: Sequence[int] = ()) -> Iterator[None]:
    """Put back what programs draw random numbers from on the CPU, and on these GPUs, as it was before."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def seed_all(seed: int, generators: Iterable[torch.Generator] = ()) -> None:
    """Seed what programs draw random numbers from on the CPU by 32 bits, and these generators."""
    random.seed(seed)
    np.random.seed(seed)
    for generator in (torch.default_generator, *generators):  # torch.manual_seed would seed accelerators, too
        generator.manual_seed(seed)
