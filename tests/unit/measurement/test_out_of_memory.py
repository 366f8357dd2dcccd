"""Memory that is short is told from other trouble, whatever framework says so."""

from __future__ import annotations

import pytest

from hvd_hetero.measurement.memory_errors import is_out_of_memory


class OutOfMemoryError(RuntimeError):
    """As PyTorch calls it."""


class NarrowerError(OutOfMemoryError):
    pass


class ResourceExhaustedError(Exception):
    """As TensorFlow calls it."""


class OpError(Exception):
    """The base of TensorFlow's errors."""


class InternalError(OpError):
    """What TensorFlow makes of the errors of libraries below it."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (NarrowerError(), True),
        (ResourceExhaustedError("OOM when allocating tensor with shape[64,3]"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (InternalError("Failed to create cuBLAS handle: CUBLAS_STATUS_ALLOC_FAILED"), True),
        (InternalError("Failed to call ThenRnnForward"), False),
        (ValueError("can't allocate memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_only_short_memory_is_short_memory(error, expected):
    assert is_out_of_memory(error) is expected
