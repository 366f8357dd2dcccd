"""Read what ``hvd-hetero check`` needs to know about this machine. Nothing is imported that may be missing.

Horovod is known by its files: an extension keeps the names of its C++ classes, also where it was stripped, so they tell
what was compiled in. A wheel of ``hvd-hetero build-horovod`` lists its patches in its metadata.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hvd_hetero.measurement.kernel import ControlGroups, memory, quota
from hvd_hetero.tools.cli.build_horovod import BUILDER_MISSING

_PROCESS, _GROUPS = Path("/proc/self"), Path("/sys/fs/cgroup")
_EXTENSIONS = {"torch": "torch/mpi_lib_v2*.so", "tensorflow": "tensorflow/mpi_lib*.so"}
_NAMES = {"torch": "pytorch", "tensorflow": "tensorflow"}  # in Horovod's metadata.json
_OPERATIONS = {"Gloo": "GlooAllreduce", "MPI": "MPIAllreduce", "NCCL": "NCCLAllreduce", "oneCCL": "CCLAllreduce"}
_RECORD = "hvd-hetero-patches"  # of a wheel's metadata, which the builder writes


@dataclass(frozen=True, slots=True)
class HorovodFacts:
    """An installed Horovod, or none."""

    version: str | None
    built_for: dict[str, str]
    """The version of each framework that it was built for; "" if it does not say."""
    operations: tuple[str, ...]
    is_patched: bool
    """True if ``build-horovod`` made it."""
    lacks: tuple[str, ...]
    """What the patches that it lacks are for; of one that ``build-horovod`` makes now, nothing."""


def versions(*distributions: str) -> dict[str, str]:
    """Return the version of each of these that is installed."""
    found = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def frameworks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the version of each framework that is installed; empty if there is none."""
    try:
        from horovod_build import HorovodBuildError, find_frameworks
    except ModuleNotFoundError:
        return versions("torch", "tensorflow")
    try:
        return {framework.module: framework.version for framework in find_frameworks(environ)}
    except HorovodBuildError:
        return {}


def keras_backend(environ: Mapping[str, str]) -> str:
    """Return the backend that Keras 3 will take, as it decides itself: by the environment, else by its settings."""
    if named := environ.get("KERAS_BACKEND"):
        return named
    folder = Path(environ.get("KERAS_HOME") or Path(environ.get("HOME", "/tmp")) / ".keras")
    return str(_settings(folder / "keras.json").get("backend", "tensorflow"))


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


def cpu_quota(process: Path = _PROCESS, root: Path = _GROUPS) -> float:
    """Return the cores that this process's control groups allow; infinite without a limit."""
    groups = ControlGroups(process, root)
    return min((quota(group) for kind in ("", "cpu") for group in groups.levels(kind)), default=math.inf)


def memory_limit(process: Path = _PROCESS, root: Path = _GROUPS) -> tuple[float, float]:
    """Return the bytes that this process's control groups allow (infinite without a limit), and the bytes in use.

    Files that were read and may be forgotten are not in use.
    """
    groups = ControlGroups(process, root)
    found = [memory(group) for kind in ("", "memory") for group in groups.levels(kind)]
    return min(found, default=(math.inf, 0.0))


def read_horovod() -> HorovodFacts:
    """Return what the files of the installed Horovod show."""
    try:
        distribution = metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return HorovodFacts(None, {}, (), is_patched=False, lacks=())
    root, record = Path(str(distribution.locate_file(""))), distribution.read_text(_RECORD)
    return horovod_in(root, distribution.version, record or "")


def horovod_in(root: Path, version: str, record: str) -> HorovodFacts:
    """Return what the files below a ``site-packages`` and the record of patches tell."""
    package = root / "horovod"
    extensions = {name: sorted(package.glob(pattern)) for name, pattern in _EXTENSIONS.items()}
    against = _settings(package / "metadata.json")
    built_for = {name: against.get(_NAMES[name], "") for name, files in extensions.items() if files}
    files = [file for found in extensions.values() for file in found]
    operations = tuple(name for name, of in _OPERATIONS.items() if any(_holds(file, of) for file in files))
    return HorovodFacts(version, built_for, operations, is_patched=bool(record), lacks=_lacking(record))


def _lacking(record: str) -> tuple[str, ...]:
    try:
        from horovod_build import series
    except ModuleNotFoundError:  # then it is not known which patches there are now
        return () if record else ("the patches of hvd-hetero",)
    lines = record.splitlines(keepends=True)
    return tuple(dict.fromkeys(patch.purpose for patch in series() if patch.line not in lines))


def _settings(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds; nothing if there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _holds(file: Path, name: str) -> bool:
    """Return whether a library has a C++ class of this name, as the ABI of gcc and clang writes it."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(f"{len(name)}{name}".encode()) != -1
