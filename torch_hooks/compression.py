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
    """One dense gradient on its way, compressed by Horovod's seam."""

    def __init__(self, gradient: torch.Tensor, name: str, compression: Any) -> None:
        self._gradient = gradient
        self._compression = compression
        packed, self._context = compression.compress(gradient)
        self._handle = hvd.allreduce_async(packed, name=name, op=hvd.Sum)

    def result(self) -> torch.Tensor:
        """Wait for it: the very tensor that was given, with the sum over all ranks in it."""
        return self._gradient.copy_(self._compression.decompress(hvd.synchronize(self._handle), self._context))
