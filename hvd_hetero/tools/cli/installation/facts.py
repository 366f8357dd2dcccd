"""Read what a check needs to know about this machine. Nothing is imported that may be missing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from hvd_hetero.measurement.control_groups import ControlGroups, memory, quota
from hvd_hetero.tools.cli.build_horovod import BUILDER_MISSING

_GROUPS = Path("/sys/fs/cgroup")


def installed_frameworks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the version of each framework that is installed; empty if there is none."""
    try:
        from horovod_build import HorovodBuildError, find_frameworks
    except ModuleNotFoundError:
        found = {name: _installed_version(name) for name in ("torch", "tensorflow")}
        return {name: version for name, version in found.items() if version is not None}
    try:
        return {framework.module: framework.version for framework in find_frameworks(environ)}
    except HorovodBuildError:
        return {}


def _installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def keras_versions(installed: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of TensorFlow and of each Keras that is installed."""
    found = {name: _installed_version(name) for name in ("keras", "tf_keras")}
    return {name: version for name, version in {**installed, **found}.items() if version is not None}


def keras_backend(environ: Mapping[str, str]) -> str:
    """Return the backend that Keras 3 will take, as it decides itself: by the environment, else by its settings."""
    if named := environ.get("KERAS_BACKEND"):
        return named
    folder = Path(environ.get("KERAS_HOME") or Path(environ.get("HOME", "/tmp")) / ".keras")
    try:
        settings = json.loads((folder / "keras.json").read_text())
    except (OSError, ValueError):
        return "tensorflow"
    return str(settings.get("backend", "tensorflow")) if isinstance(settings, dict) else "tensorflow"


def missing_tools(environ: Mapping[str, str]) -> str:
    """Return what a build of Horovod lacks here, in words; "" if it lacks nothing."""
    try:
        from horovod_build import HorovodBuildError, find_toolchain
    except ModuleNotFoundError:
        return BUILDER_MISSING
    try:
        find_toolchain(environ)
    except HorovodBuildError as error:
        return str(error)
    return ""


def gpus() -> int:
    """Return the number of NVIDIA GPUs that the driver shows."""
    folder = Path("/proc/driver/nvidia/gpus")
    return len(os.listdir(folder)) if folder.is_dir() else 0


def cpu_quota(process: Path = Path("/proc/self"), root: Path = _GROUPS) -> float:
    """Return the cores that this process's control groups allow; infinite without a limit."""
    groups = ControlGroups(process, root)
    return min((quota(group) for kind in ("", "cpu") for group in groups.levels(kind)), default=math.inf)


def memory_limit(process: Path = Path("/proc/self"), root: Path = _GROUPS) -> tuple[float, float]:
    """Return the bytes that this process's control groups allow (infinite without a limit), and the bytes in use.

    Files that were read and may be forgotten are not in use.
    """
    groups = ControlGroups(process, root)
    found = [memory(group) for kind in ("", "memory") for group in groups.levels(kind)]
    return min(found, default=(math.inf, 0.0))
