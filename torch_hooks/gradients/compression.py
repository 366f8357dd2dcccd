"""Gradients that are compressed on the wire: in another type, or by ``hvd.Compression`` or anything like it."""

from __future__ import annotations

from typing import Any

import torch

from torch_hooks.wires.choice import TorchWire

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# By its name, because on other wires Horovod need not be installed.
_NONE = "horovod.torch.compression.NoneCompressor"


def compressor(compression: Any, wire: TorchWire) -> Any:
    """Return the compressor, after checking it; None if nothing is to be compressed."""
    if compression is None or _qualified_name(compression) == _NONE:
        return None
    if isinstance(compression, torch.dtype):
        if compression in wire.cannot_sum:
            raise ValueError(f"compression={compression} is a type that Horovod cannot sum. Write torch.float16")
        return InType(compression)
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise TypeError(
            f"compression must be a type, such as torch.float16, or have compress() and decompress(), such as "
            f"hvd.Compression.fp16; got {compression!r}"
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
        """Return the tensor to send, and the type in which the result is wanted."""
        return (tensor.to(self.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    def decompress(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum in the gradient's type."""
        return tensor.to(dtype)


def _qualified_name(compressor: Any) -> str:
    return f"{getattr(compressor, '__module__', '')}.{getattr(compressor, '__qualname__', '')}"
