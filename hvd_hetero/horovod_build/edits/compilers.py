"""Edits that let today's compilers and frameworks take sources of 2023."""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["COMPILER_EDITS"]

COMPILER_EDITS = (
    Edit("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)", "torch's headers are C++17"),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 17)",
        "torch's headers are C++17",
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
        "its XLA headers left TensorFlow in 2.19; only jit-compiled GPU collectives are lost",
    ),
)
