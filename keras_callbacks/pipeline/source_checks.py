"""Checks that a dataset comes as single samples in the same order on every rank, as far as its pipeline shows."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

logger = logging.getLogger(__name__)

_MAY_DIFFER = re.compile(rb"Random|Multinomial|TruncatedNormal|Stateful|Sample|PyFunc")  # operations


def check_same_data(samples: tf.data.Dataset, rank: int, workers: int, *, certain: bool) -> int:
    """Refuse data that ranks would read in different orders; return a checksum of the seeds of shuffles, to compare.

    Seeds include ``tf.random.set_seed``'s. ``certain``: the user has said that all ranks read the same samples, so a
    step ``shard(…)`` is meant for something else.
    """
    found: list[int] = []
    if workers == 1:
        return 0
    for step in _steps(samples):
        # Not public names: if they are missing, nothing is checked.
        seeds = _numbers(step, "_seed", "_seed2")
        if "Shuffle" in type(step).__name__ and seeds == [0, 0]:
            raise ValueError(
                "the dataset is shuffled without a seed, so every rank would read it in another order; write "
                "shuffle(…, seed=…) (or list_files(…, seed=…)), or resize_batches(…, shuffle=True). If every rank "
                "reads files of its own, say resize_batches(…, stream='shard')"
            )
        if getattr(step, "_deterministic", None) == "false":
            raise ValueError(
                "a map or interleave of the dataset has deterministic=False, so every rank would read it in another "
                "order; leave that out, or say resize_batches(…, stream='shard') if every rank reads files of its own"
            )
        if not certain and _numbers(step, "_num_shards", "_index") == [workers, rank]:
            raise ValueError(
                f"the dataset has a step shard({workers}, {rank}), and resize_batches would share its samples out once "
                "more; say resize_batches(…, stream='shard'), or stream='whole' if all ranks read the same"
            )
        found += seeds
    return zlib.crc32(np.array(found, dtype="<i8").tobytes())


def check_single(samples: tf.data.Dataset) -> None:
    """Refuse a dataset that was left batched; warn of batches of one size, which may be meant as samples."""
    kinds = (type(step).__name__ for step in _steps(samples))
    last = next((kind for kind in kinds if re.search("[Bb]atch|FlatMap|Interleave|GroupBy", kind)), "")
    sizes = {spec.shape[0] if spec.shape.rank else 0 for spec in tf.nest.flatten(samples.element_spec)}
    if "Batch" not in last or 0 in sizes or len(sizes) > 1:
        return
    remedy = "Leave batch(…) out, or put unbatch() behind it: resize_batches takes single samples"
    if sizes == {None}:
        raise ValueError(f"data must be a dataset of single samples, and it ends in a step batch(…). {remedy}")
    logger.warning("the dataset ends in batches of %s, and each is taken as one sample. %s", *sizes, remedy)


def compared(data: Any, spec: Any) -> list[int]:
    """Return which components of a sample must be equal on all ranks: all, or only labels where data are augmented.

    A label is one whole number or string a sample.
    """
    # Functions that draw random numbers or run Python may rightly differ in pictures, masks and mixed targets. When all
    # was compared, six legitimate scripts stopped in the first round.
    augments = not isinstance(data, tf.data.Dataset) or any(
        _MAY_DIFFER.search(function.function.graph.as_graph_def().SerializeToString())
        for step in _steps(data)
        for function in step._functions()
    )
    return [
        i
        for i, part in enumerate(tf.nest.flatten(spec))
        if not augments or (part.shape[1:].num_elements() == 1 and not part.dtype.is_floating)
    ]


def _numbers(step: Any, *names: str) -> list[int]:
    values = [getattr(step, name, None) for name in names]
    return [int(value) for value in values if value is not None]


def _steps(dataset: Any) -> Iterator[Any]:
    yield dataset
    for one in dataset._inputs():
        yield from _steps(one)
