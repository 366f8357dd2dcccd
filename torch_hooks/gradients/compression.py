"""Gradients that are compressed on the wire: in another type, or by ``hvd.Compression`` or anything like it."""

from __future__ import annotations

from typing import Any

import torch

from torch_hooks.wires.choice import TorchWire

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NONE = "horovod.torch.compression.NoneCompressor"  # by its name: on other wires Horovod need not be there


def compressor(compression: Any, wire: TorchWire) -> Any:
    """Return the compressor, after checking it; None if nothing is to be compressed."""
    if compression is None or _qualified_name(compression) == _NONE:
        return None
    if isinstance(compression, torch.dtype):
        if compression in wire.cannot_sum:
            raise ValueError(f"compression={compression} is a type that Horovod cannot sum; write torch.float16")
        return InType(compression)
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise TypeError(
            f"compression must be a type, as torch.float16, or have compress and decompress, as hvd.Compression.fp16; "
            f"got {compression!r}"
        )
    return compression


class InType:
    """Sends floating-point gradients in a type of fewer bits, in which they are also summed."""

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in _TYPES:
            known = ", ".join(map(str, _TYPES))
            raise ValueError(f"compression must be one of {known}, got {dtype}; write compression=torch.float16")
        self.dtype = dtype
        self.__name__ = str(dtype)

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return what to send, and the type to come back to."""
        return (tensor.to(self.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    def decompress(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return what has come, in the gradient's type."""
        return tensor.to(dtype)


def _qualified_name(compressor: Any) -> str:
    return f"{getattr(compressor, '__module__', '')}.{getattr(compressor, '__qualname__', '')}"
