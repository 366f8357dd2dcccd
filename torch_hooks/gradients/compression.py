"""Gradients that are compressed on the wire, by Horovod's own seam: ``hvd.Compression``, or anything like it."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

__all__ = ["Compressed", "compressor"]


def compressor(compression: Any) -> Any:
    """What compresses, if it is something that does; None where nothing is to be compressed."""
    if compression is None or compression is hvd.Compression.none:
        return None
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise TypeError(f"compression must have compress and decompress, as hvd.Compression.fp16, got {compression!r}")
    return compression


class Compressed:
    """Dense gradients on their way, compressed by Horovod's seam."""

    def __init__(self, gradients: list[torch.Tensor], name: str, compression: Any) -> None:
        self._gradients = gradients
        self._compression = compression
        packed, self._contexts = zip(*(compression.compress(gradient) for gradient in gradients), strict=True)
        self._handle = hvd.grouped_allreduce_async(list(packed), name=name, op=hvd.Sum)

    def finish(self) -> None:
        """Wait for the sums over all ranks, and put them into the very tensors that were given."""
        sums = hvd.synchronize(self._handle)
        for gradient, each, context in zip(self._gradients, sums, self._contexts, strict=True):
            gradient.copy_(self._compression.decompress(each, context))
