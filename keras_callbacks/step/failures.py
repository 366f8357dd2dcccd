"""A collective that failed, told so that Horovod's elastic mode understands it.

In TensorFlow such a failure is an ``UnknownError``, which ``hvd.elastic.run`` recognises by the names of three kinds of
operation in its text: not ``alltoall``, and not in what ``sync()`` raises. And any other ``UnknownError``, such as that
of a Python function called from the graph, it takes for the end of the training, without a word.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hvd_hetero.errors import HeteroError

__all__ = ["failures_told", "tells_failures", "told"]


def told(error: BaseException, *, elastic: bool = True) -> Exception | None:
    """What to raise in place of this error; None where it says by itself what it is."""
    if not isinstance(error, tf.errors.UnknownError):
        return None
    if "Horovod" in str(error):
        failed: Exception = HorovodInternalError(str(error))
        return failed
    return HeteroError(f"a function called from the graph failed: {error}") if elastic else None


@contextlib.contextmanager
def failures_told(*, elastic: bool = True) -> Iterator[None]:
    """Around what Horovod itself does not watch, or would take for the end."""
    try:
        yield
    except tf.errors.UnknownError as error:
        if (failure := told(error, elastic=elastic)) is None:
            raise
        raise failure from error


def tells_failures(function: Callable[..., Any], elastic: Callable[[], bool]) -> Callable[..., Any]:
    """The function, whose failures are told."""

    @functools.wraps(function)
    def watched(*args: Any, **options: Any) -> Any:
        with failures_told(elastic=elastic()):
            return function(*args, **options)

    return watched
