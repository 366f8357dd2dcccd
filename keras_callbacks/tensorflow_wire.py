"""Horovod's collectives outside of graphs, called from Python; and the errors of collectives in either place.

``step.graph_synchroniser`` has the collectives in a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hvd_hetero.communication.objects import all_objects, object_of
from hvd_hetero.errors import HeteroError


class TensorFlowWire:
    """Collectives of small values and of variables, each under a name that all ranks give it."""

    @property
    def initialized(self) -> bool:
        """True once ``hvd.init()`` was called."""
        return bool(hvd.is_initialized())

    @property
    def rank(self) -> int:
        """The number of this rank, which an elastic reset may change."""
        return int(hvd.rank())

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(hvd.size())

    def sum(self, value: Any, name: str) -> tf.Tensor:
        """Return the sum of all ranks' values, which are numbers, arrays or tensors of one shape and type."""
        return hvd.allreduce(tf.convert_to_tensor(value), op=hvd.Sum, name=name)

    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        """Return rank ``root_rank``'s tensor."""
        return hvd.broadcast(tensor, root_rank=root_rank, name=name)

    def broadcast_object(self, obj: Any, root_rank: int, name: str) -> Any:
        """Return rank ``root_rank``'s object."""
        return object_of(obj, self.rank == root_rank, name, _laid_end_to_end)

    def allgather_object(self, obj: Any, name: str) -> Sequence[Any]:
        """Return all ranks' objects, in order of rank."""
        return all_objects(obj, name, self.size, _laid_end_to_end)


def _laid_end_to_end(name: str, mine: memoryview) -> memoryview:
    with tf.device("cpu:0"):
        return memoryview(hvd.allgather(tf.constant(np.frombuffer(mine, np.uint8)), name=name).numpy())


def translated(error: BaseException, *, elastic: bool = True) -> Exception | None:
    """Return the error to raise instead of this one; None if it can be raised as it is."""
    if not isinstance(error, tf.errors.UnknownError):
        return None
    # hvd.elastic.run recognises a failed collective by the names of three kinds of operation in the error's text: not
    # alltoall, and not in what sync() raises.
    if "Horovod" in str(error):
        failed: Exception = HorovodInternalError(str(error))
        return failed
    # It takes any other UnknownError for the end of the training, without a word.
    return HeteroError(f"a function called from the graph failed: {error}") if elastic else None


@contextlib.contextmanager
def translated_failures(elastic: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Raise failures of collectives as Horovod's elastic mode expects them; a context manager and a decorator."""
    try:
        yield
    except tf.errors.UnknownError as error:
        if (failure := translated(error, elastic=elastic())) is None:
            raise
        raise failure from error
