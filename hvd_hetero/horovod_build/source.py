"""Horovod's source distribution: fetched through pip, verified, unpacked, and edited.

Going through pip means that the user's own index, proxy, certificate and offline settings hold. pip is given the hash,
and compares it before it runs anything of what it downloaded.
"""

import hashlib
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from hvd_hetero.horovod_build.edits import Edit
from hvd_hetero.horovod_build.errors import HorovodBuildError
from hvd_hetero.horovod_build.process import run_logged

__all__ = ["HOROVOD_VERSION", "SDIST_NAME", "SDIST_SHA256", "apply_edits", "fetch", "pip_download", "sha256", "unpack"]

HOROVOD_VERSION = "0.28.1"
SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def pip_download(into: Path, log: Path) -> None:
    """Let pip download the source distribution into a directory.

    pip reads the metadata of what it downloads, for which it runs the distribution's setup.py. That compiles nothing,
    and without build isolation it needs no further download, but it needs setuptools, which is checked for beforehand.
    """
    requirement = into / "horovod.txt"
    requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n")
    run_logged(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"),
            *("--no-binary", "horovod", "--no-build-isolation", "--require-hashes"),
            *("--requirement", str(requirement), "--dest", str(into)),
        ],
        log=log,
        doing="pip could not download Horovod's source distribution",
    )


def fetch(kept: Path, workspace: Path, log: Path, download: Callable[[Path, Path], None] = pip_download) -> Path:
    """Return the verified source distribution: the one in ``kept`` if it is intact, else a fresh one, now kept."""
    target = kept / SDIST_NAME
    if target.exists():
        if sha256(target) == SDIST_SHA256:
            return target
        target.unlink()
    arrived = workspace / SDIST_NAME
    download(workspace, log)
    if not arrived.exists():
        raise HorovodBuildError(f"pip reported success but did not deliver {SDIST_NAME}; its log is {log}")
    verify(arrived)
    os.replace(arrived, target)
    return target


def verify(sdist: Path) -> None:
    """Raise unless the file is the very source distribution that the edits were made for."""
    if (found := sha256(sdist)) != SDIST_SHA256:
        raise HorovodBuildError(
            f"the SHA-256 of {sdist.name} must be {SDIST_SHA256}, but it is {found}; nothing was built from it. "
            "The download was damaged or replaced on its way: run again, or look at your package index"
        )


def unpack(sdist: Path, into: Path) -> Path:
    """Unpack the source distribution and return the root of its tree."""
    with tarfile.open(sdist) as archive:
        # The filter came with Python's security releases of 2023; an older one needs no less a verified hash.
        if hasattr(tarfile, "data_filter"):
            archive.extractall(into, filter="data")
        else:
            archive.extractall(into)
    return into / f"horovod-{HOROVOD_VERSION}"


def apply_edits(tree: Path, edits: tuple[Edit, ...]) -> None:
    """Make edits in order; one that does not find exactly one place to change is an error that names the file."""
    for edit in edits:
        path = tree / edit.path
        text = path.read_text() if path.exists() else ""
        if (places := text.count(edit.old)) != 1:
            raise HorovodBuildError(
                f"{edit.path} of Horovod {HOROVOD_VERSION} must contain {edit.old.strip()!r} exactly once, "
                f"to be edited because {edit.reason}; it was found {places} times. "
                "This is not the source that the edits are for"
            )
        path.write_text(text.replace(edit.old, edit.new))
