"""Horovod outside of graphs: all that ranks tell one another from Python. In a graph, ``step.synchroniser`` does."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

__all__ = ["TensorFlowWire"]


class TensorFlowWire:
    """Collectives of small values and of variables, each under a name that all ranks give it."""

    @property
    def initialized(self) -> bool:
        """Whether ``hvd.init()`` was called."""
        return bool(hvd.is_initialized())

    @property
    def rank(self) -> int:
        """The number of this rank; another one after an elastic reset, perhaps."""
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
        return hvd.broadcast_object(obj, root_rank=root_rank, name=name)

    def allgather_object(self, obj: Any, name: str) -> list[Any]:
        """Return all ranks' objects, in order of rank."""
        return list(hvd.allgather_object(obj, name=name))
