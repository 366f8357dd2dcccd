"""Horovod 0.28.1 for the PyTorch and TensorFlow of the running interpreter: fetched, patched, built and cached."""

from horovod_build.command import build_horovod
from horovod_build.patches import RECORD, Patch, series
from horovod_build.plan import find_frameworks
from horovod_build.process import HorovodBuildError
from horovod_build.toolchain import find_toolchain

__all__ = ["RECORD", "HorovodBuildError", "Patch", "build_horovod", "find_frameworks", "find_toolchain", "series"]
