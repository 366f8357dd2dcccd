"""Which exceptions say that memory is short, whatever framework raises them: told by name and message."""

from __future__ import annotations

__all__ = ["is_out_of_memory"]

# PyTorch raises its own class where its allocator fails, TensorFlow another; libraries below them and PyTorch's
# allocator for the host raise plain RuntimeErrors.
_NAMES = {"OutOfMemoryError", "ResourceExhaustedError", "MemoryError"}
_MESSAGES = (
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "not enough memory: you tried to allocate",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the same work in smaller pieces might do."""
    if any(kind.__name__ in _NAMES for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)
