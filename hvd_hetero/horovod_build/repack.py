"""Edit the Python files of a wheel."""

import sys
from pathlib import Path

from hvd_hetero.horovod_build.edits import Edit
from hvd_hetero.horovod_build.errors import HorovodBuildError
from hvd_hetero.horovod_build.process import run_logged
from hvd_hetero.horovod_build.source import apply_edits

__all__ = ["edit_wheel"]


def edit_wheel(wheel: Path, edits: tuple[Edit, ...], work: Path, log: Path) -> Path:
    """Return a wheel with the edits made, in a work directory; the one given stays as it is."""
    unpacked, packed = work / "unpacked", work / "packed"
    packed.mkdir()
    doing = f"{wheel.name} could not be edited"
    run_logged([sys.executable, "-m", "wheel", "unpack", "--dest", str(unpacked), str(wheel)], log=log, doing=doing)
    (tree,) = unpacked.iterdir()
    apply_edits(tree, edits)
    # It writes a RECORD of its own, with the digests of the edited files.
    run_logged([sys.executable, "-m", "wheel", "pack", "--dest-dir", str(packed), str(tree)], log=log, doing=doing)
    if not (edited := packed / wheel.name).is_file():
        raise HorovodBuildError(f"{wheel.name} was edited, but another name came out; the log is {log}")
    return edited
