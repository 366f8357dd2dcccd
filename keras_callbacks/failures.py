"""A collective that failed, told so that Horovod's elastic mode understands it.

In TensorFlow such a failure is an ``UnknownError``, which ``hvd.elastic.run`` recognises by the names of three kinds of
operation in its text: not ``alltoall``, and not in what ``sync()`` raises. And any other ``UnknownError``, such as that
of a Python function called from the graph, it takes for the end of the training, without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hvd_hetero.errors import HeteroError

__all__ = ["failures_told", "told"]


def told(error: BaseException, *, elastic: bool = True) -> Exception | None:
    """What to raise in place of this error; None where it says by itself what it is."""
    if not isinstance(error, tf.errors.UnknownError):
        return None
    if "Horovod" in str(error):
        failed: Exception = HorovodInternalError(str(error))
        return failed
    return HeteroError(f"a function called from the graph failed: {error}") if elastic else None


@contextlib.contextmanager
def failures_told() -> Iterator[None]:
    """Around collectives that Horovod itself does not watch."""
    try:
        yield
    except tf.errors.UnknownError as error:
        raise told(error) or error from error
