"""Horovod's source distribution: fetched through pip, verified, and unpacked.

Going through pip means that the user's own index, proxy, certificate and offline settings hold. pip is given the hash,
and compares it before it runs anything of what it downloaded.
"""

import hashlib
import os
import sys
import tarfile
from pathlib import Path

from horovod_build.process import HorovodBuildError, run_logged

HOROVOD_VERSION = "0.28.1"
SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(kept: Path, work: Path, log: Path) -> Path:
    """Return the verified source distribution: the one in ``kept`` if it is intact, else a fresh one, now kept.

    pip reads the metadata of what it downloads, for which it runs the distribution's setup.py. That compiles nothing,
    and without build isolation it needs no further download, but it needs setuptools, which is checked for beforehand.
    """
    target, arrived, requirement = kept / SDIST_NAME, work / SDIST_NAME, work / "horovod.txt"
    if target.exists() and sha256(target) == SDIST_SHA256:
        return target
    requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n")
    argv = [
        *(
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "--no-deps",
            "--no-binary",
            "horovod",
        ),
        *("--no-build-isolation", "--require-hashes", "--requirement", str(requirement), "--dest", str(work)),
    ]
    run_logged(argv, log=log, doing="pip could not download Horovod's source distribution")
    verify(arrived)
    os.replace(arrived, target)
    return target


def verify(sdist: Path) -> None:
    """Raise unless the file is the very source distribution that the patches were made for."""
    if (found := sha256(sdist)) != SDIST_SHA256:
        raise HorovodBuildError(
            f"the SHA-256 of {sdist.name} must be {SDIST_SHA256}, but it is {found}; nothing was built from it. "
            "The download was damaged or replaced on its way: run again, or look at your package index"
        )


def unpack(sdist: Path, into: Path) -> Path:
    """Unpack the source distribution and return the root of its tree."""
    with tarfile.open(sdist) as archive:
        # Came with Python's security releases of 2023; an older one needs no less a verified hash.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(into)
    return into / f"horovod-{HOROVOD_VERSION}"
