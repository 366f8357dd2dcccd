"""Join wheels that were compiled for one framework each, and edit their Python files."""

import json
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from hvd_hetero.horovod_build.edits import Edit
from hvd_hetero.horovod_build.errors import HorovodBuildError
from hvd_hetero.horovod_build.process import run_logged
from hvd_hetero.horovod_build.source import apply_edits

__all__ = ["join_wheels"]

_VERSIONS = "horovod/metadata.json"  # of the frameworks, by name


def join_wheels(wheels: Sequence[Path], edits: tuple[Edit, ...], work: Path, log: Path) -> Path:
    """Return a wheel in a work directory with the extensions of all wheels, edited; those given stay as they are."""
    first, *others = wheels
    unpacked, packed = work / "unpacked", work / "packed"
    packed.mkdir()
    doing = f"{first.name} could not be edited"
    run_logged([sys.executable, "-m", "wheel", "unpack", "--dest", str(unpacked), str(first)], log=log, doing=doing)
    (tree,) = unpacked.iterdir()
    for other in others:
        _add(other, tree)
    apply_edits(tree, edits)
    # It writes a RECORD of its own, with the digests of the edited files.
    run_logged([sys.executable, "-m", "wheel", "pack", "--dest-dir", str(packed), str(tree)], log=log, doing=doing)
    if not (edited := packed / first.name).is_file():
        raise HorovodBuildError(f"{first.name} was edited, but another name came out; the log is {log}")
    return edited


def _add(wheel: Path, tree: Path) -> None:
    """Add what the tree lacks, which is an extension, and the version of its framework."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not (tree / name).exists():
                archive.extract(name, tree)
        versions = json.loads((tree / _VERSIONS).read_text()) | json.loads(archive.read(_VERSIONS))
    (tree / _VERSIONS).write_text(json.dumps(versions))
