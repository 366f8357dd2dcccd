"""Read the facts of an installed Horovod from its files, without importing it or a framework.

An extension keeps the names of its C++ classes, even if it was stripped, so they show what was compiled in. The
edits of ``hvd-hetero build-horovod`` are searched in the text of the Python files, and by a word in an extension.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvd_hetero.horovod_build.edits import PACKAGE_EDITS, SOURCE_EDITS, Edit

__all__ = ["HorovodFacts", "read_horovod"]

_EXTENSIONS = {"torch": "torch/mpi_lib_v2*.so", "tensorflow": "tensorflow/mpi_lib*.so"}
_NAMES = {"torch": "pytorch", "tensorflow": "tensorflow"}  # in Horovod's metadata.json
_OPERATIONS = {"Gloo": "GlooAllreduce", "MPI": "MPIAllreduce", "NCCL": "NCCLAllreduce", "oneCCL": "CCLAllreduce"}
_COMPILED_EDIT = b"HOROVOD_WAIT_SLEEP_US"

# By a file whose edits all serve one purpose. But the server's edits serve two: secret.py stands for the other one.
_PURPOSES = {
    "horovod/common/util.py": "horovodrun that asks what was built without importing TensorFlow (7 s a launch)",
    "horovod/runner/common/util/secret.py": "a launcher that only its own job can talk to (CVE-2024-10190, "
    "CVE-2026-31234)",
    "horovod/runner/http/http_server.py": "ranks that find each other at once (16 of them otherwise in 22 s)",
    "horovod/runner/elastic/discovery.py": "discovery scripts of elastic jobs that cost little and have a time limit",
    "horovod/runner/elastic/driver.py": "elastic jobs that wait for no rank that starts, and have spares",
    "horovod/runner/elastic/registration.py": "elastic jobs that give up a rank that is frozen or cut off",
}
_COMPILED = "waits that leave the processor to other ranks, and connections that close when a rank gives up"


@dataclass(frozen=True, slots=True)
class HorovodFacts:
    """An installed Horovod, or none."""

    version: str | None
    built_for: dict[str, str]
    """The version of each framework that it was built for; "" if it does not say."""
    operations: tuple[str, ...]
    has_edits: bool
    """True if any edit of ``build-horovod`` is in it."""
    lacks: tuple[str, ...]
    """What it lacks compared to one that ``build-horovod`` makes now, in words."""


def read_horovod() -> HorovodFacts:
    """Return what the files of the installed Horovod show."""
    try:
        distribution = metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return HorovodFacts(None, {}, (), has_edits=False, lacks=())
    return horovod_in(Path(str(distribution.locate_file(""))), distribution.version)


def horovod_in(root: Path, version: str) -> HorovodFacts:
    """Return what the files below a ``site-packages`` show."""
    package = root / "horovod"
    extensions = {name: sorted(package.glob(pattern)) for name, pattern in _EXTENSIONS.items()}
    against = _built_against(package / "metadata.json")
    built_for = {name: against.get(_NAMES[name], "") for name, files in extensions.items() if files}
    files = [file for found in extensions.values() for file in found]
    operations = tuple(name for name, of in _OPERATIONS.items() if any(_holds(f, _mangled(of)) for f in files))
    edits = [edit for edit in (*SOURCE_EDITS, *PACKAGE_EDITS) if edit.path.endswith(".py")]
    made = {edit: _is_made(edit, root) for edit in edits}
    lacks = [purpose for path, purpose in _PURPOSES.items() if not all(v for e, v in made.items() if e.path == path)]
    if not all(made.values()) and not lacks:
        lacks.append("edits of this release")
    compiled = all(_holds(file, _COMPILED_EDIT) for file in extensions["torch"])
    if not compiled or (lacks and not extensions["torch"]):
        lacks.append(_COMPILED)
    has_edits = any(v for e, v in made.items() if e.path in _PURPOSES)
    return HorovodFacts(version, built_for, operations, has_edits=has_edits, lacks=tuple(lacks))


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


def _is_made(edit: Edit, root: Path) -> bool:
    path = root / edit.path
    return not path.exists() or edit.new in path.read_text(errors="replace")
