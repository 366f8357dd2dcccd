"""Horovod 0.28.1 for the torch and TensorFlow of the running interpreter: fetched, edited, built and cached."""

from hvd_hetero.horovod_build.cache import WheelCache, cache_root
from hvd_hetero.horovod_build.command import add_arguments, ensure_wheel, run
from hvd_hetero.horovod_build.errors import HorovodBuildError
from hvd_hetero.horovod_build.plan import BuildPlan, Framework, find_frameworks, make_plan

__all__ = [
    "BuildPlan",
    "Framework",
    "HorovodBuildError",
    "WheelCache",
    "add_arguments",
    "cache_root",
    "ensure_wheel",
    "find_frameworks",
    "make_plan",
    "run",
]
