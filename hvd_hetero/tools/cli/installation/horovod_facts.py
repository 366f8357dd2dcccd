"""Read the facts of an installed Horovod from its files, without importing it or a framework.

An extension keeps the names of its C++ classes, also where it was stripped, so they tell what was compiled in. A wheel
of ``hvd-hetero build-horovod`` lists its patches in its metadata.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

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
    against = _built_against(package / "metadata.json")
    built_for = {name: against.get(_NAMES[name], "") for name, files in extensions.items() if files}
    files = [file for found in extensions.values() for file in found]
    operations = tuple(name for name, of in _OPERATIONS.items() if any(_holds(f, _mangled(of)) for f in files))
    return HorovodFacts(version, built_for, operations, is_patched=bool(record), lacks=_lacking(record))


def _lacking(record: str) -> tuple[str, ...]:
    try:
        from horovod_build import series
    except ModuleNotFoundError:  # then it is not known which patches there are now
        return () if record else ("the patches of hvd-hetero",)
    lines = record.splitlines(keepends=True)
    return tuple(dict.fromkeys(patch.purpose for patch in series() if patch.line not in lines))


def _built_against(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def _mangled(name: str) -> bytes:
    return f"{len(name)}{name}".encode()  # as the C++ ABI of gcc and clang writes a name


def _holds(file: Path, word: bytes) -> bool:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(word) != -1
