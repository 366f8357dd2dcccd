"""Edits for builds with GPU operations, as today's CUDA, drivers and wheels are laid out."""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["CUDA_EDITS"]

CUDA_EDITS = (
    Edit(
        "cmake/Modules/FindNCCL.cmake",
        '    set(NCCL_LIBNAME "nccl")\n',
        '    set(NCCL_LIBNAME "nccl" "libnccl.so.2" NAMES_PER_DIR)\n',
        "the NCCL that comes with torch has no libnccl.so, which is for compilers",
    ),
    Edit(
        "horovod/common/ops/cuda/CMakeLists.txt",
        "add_library(compatible_horovod_cuda_kernels cuda_kernels.cu)\n",
        "add_library(compatible_horovod_cuda_kernels EXCLUDE_FROM_ALL cuda_kernels.cu)\n",
        "kernels for frameworks of the C++ ABI before 2015 are compiled only where one is linked with them",
    ),
    Edit(
        "horovod/torch/cuda_util.cc",
        'dlopen("libcuda.so", RTLD_LAZY)',
        'dlopen("libcuda.so.1", RTLD_LAZY)',
        "drivers bring libcuda.so.1; libcuda.so is for compilers, and containers often lack it",
    ),
)
