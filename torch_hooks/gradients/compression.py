"""Gradients that are compressed on the wire, by Horovod's own seam: ``hvd.Compression``, or anything like it."""

from __future__ import annotations

from typing import Any

import torch

from torch_hooks.wires.choice import TorchWire

__all__ = ["Compressed", "compressor"]

_NONE = "horovod.torch.compression.NoneCompressor"  # by its name: on other wires Horovod need not be there


def compressor(compression: Any) -> Any:
    """What compresses, if it is something that does; None where nothing is to be compressed."""
    if compression is None or _qualified_name(compression) == _NONE:
        return None
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise TypeError(f"compression must have compress and decompress, as hvd.Compression.fp16, got {compression!r}")
    return compression


def _qualified_name(compressor: Any) -> str:
    return f"{getattr(compressor, '__module__', '')}.{getattr(compressor, '__qualname__', '')}"


class Compressed:
    """Dense gradients on their way, compressed by Horovod's seam."""

    done = False
    """Not known: unpacking is still to come."""

    def __init__(self, wire: TorchWire, gradients: list[torch.Tensor], name: str, compression: Any) -> None:
        self._wire = wire
        self._gradients = gradients
        self._compression = compression
        packed, self._contexts = zip(*(compression.compress(gradient) for gradient in gradients), strict=True)
        self._handle = wire.start_sums(list(packed), name)

    def finish(self) -> None:
        """Wait for the sums over all ranks, and put them into the very tensors that were given."""
        sums = self._wire.result(self._handle)
        for gradient, each, context in zip(self._gradients, sums, self._contexts, strict=True):
            gradient.copy_(self._compression.decompress(each, context))
