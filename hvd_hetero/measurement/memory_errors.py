"""Exceptions that mean that memory is short, whatever framework raises them: their names and messages identify them."""

from __future__ import annotations

# PyTorch raises its own class if its allocator fails, TensorFlow another. Libraries below them and PyTorch's allocator
# for the host raise plain RuntimeErrors, or what TensorFlow makes of them, such as an InternalError.
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
    """Return whether the same work in smaller pieces might succeed."""
    if any(kind.__name__ in _NAMES for kind in type(error).__mro__):
        return True
    of_a_library = isinstance(error, RuntimeError) or any(kind.__name__ == "OpError" for kind in type(error).__mro__)
    return of_a_library and any(message in str(error) for message in _MESSAGES)
