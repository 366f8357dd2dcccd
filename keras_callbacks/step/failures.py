"""Translate the failure of a collective, so that Horovod's elastic mode understands it.

In TensorFlow such a failure is an ``UnknownError``, which ``hvd.elastic.run`` recognises by the names of three kinds of
operation in its text: not ``alltoall``, and not in what ``sync()`` raises. It takes any other ``UnknownError``, such as
that of a Python function called from the graph, for the end of the training, without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hvd_hetero.errors import HeteroError


def told(error: BaseException, *, elastic: bool = True) -> Exception | None:
    """Return the error to raise instead of this one; None if it is clear by itself."""
    if not isinstance(error, tf.errors.UnknownError):
        return None
    if "Horovod" in str(error):
        failed: Exception = HorovodInternalError(str(error))
        return failed
    return HeteroError(f"a function called from the graph failed: {error}") if elastic else None


@contextlib.contextmanager
def failures_told(elastic: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Translate failures that Horovod itself does not watch, or would take for the end; also around a function."""
    try:
        yield
    except tf.errors.UnknownError as error:
        if (failure := told(error, elastic=elastic())) is None:
            raise
        raise failure from error
