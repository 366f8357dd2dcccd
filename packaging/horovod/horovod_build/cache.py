"""The cache of built wheels, under the user's cache directory.

    hvd-hetero/horovod/lock                     held during a build
    hvd-hetero/horovod/horovod-0.28.1.tar.gz    the verified source distribution
    hvd-hetero/horovod/<key>/*                  one wheel per key, its digest, and build.log
    hvd-hetero/horovod/<key>_compiled/*         the same of what the compiler made for one framework
    hvd-hetero/horovod/work-*/                  a build under way

A wheel appears by a rename within one file system, so that it is there whole or not at all. Its digest shows whether it
was damaged later, but not by whom: ``require_own`` refuses a cache that others can write to. Only the holder of the
lock makes work directories, so any that it finds were left by a build that was killed, and are removed.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from horovod_build.plan import BuildPlan
from horovod_build.process import HorovodBuildError
from horovod_build.source import sha256

_EXTENSIONS = {"torch": "horovod/torch/mpi_lib_v2.", "tensorflow": "horovod/tensorflow/mpi_lib."}


def cache_root(environ: Mapping[str, str]) -> Path:
    """Return the directory of the cache, by the XDG rules (a relative XDG_CACHE_HOME is to be ignored)."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hvd-hetero" / "horovod"


def _lacking(wheel: Path, plan: BuildPlan) -> str:
    """Return what a wheel lacks, or "". Horovod builds without a framework that it could not find."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile) as reason:
        return f"it cannot be read ({reason})"
    lacking = [f.module for f in plan.frameworks if not any(n.startswith(_EXTENSIONS[f.module]) for n in names)]
    return f"it has no extension for {' and '.join(lacking)}" if lacking else ""


@dataclass(frozen=True, slots=True)
class WheelCache:
    """Wheels by key, below one directory."""

    root: Path

    def entry(self, plan: BuildPlan) -> Path:
        """Return the directory of a plan's wheel."""
        return self.root / plan.key

    def new_log(self, plan: BuildPlan) -> Path:
        """Return the log of a plan's build, now empty."""
        log = self.entry(plan) / "build.log"
        log.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        log.write_text("")
        return log

    def require_own(self) -> None:
        """Raise if another user could have put a wheel here, whose code would run at its installation and import."""
        me, home = os.geteuid(), self.root.parent
        for path in (home.parent, home, self.root, *self.root.glob("*/"), *self.root.glob("*/*.whl")):
            try:
                status = path.stat()
            except OSError:  # not made yet, or another build's that ends
                continue
            others = status.st_mode & stat.S_IWOTH and not (path == home.parent and status.st_mode & stat.S_ISVTX)
            group = status.st_mode & stat.S_IWGRP and status.st_gid != os.getegid()
            if others or group or status.st_uid not in ((me, 0) if path == home.parent else (me,)):
                raise HorovodBuildError(
                    f"the cache of built wheels is not yours alone: {path} has the owner {status.st_uid} and mode "
                    f"{stat.S_IMODE(status.st_mode):o}. Others could put code there, which would run as you. Remove "
                    f"{home} and let no one else write there, or set XDG_CACHE_HOME to a folder of your own"
                )

    def find(self, plan: BuildPlan) -> Path | None:
        """Return the plan's wheel if it is there, as it was stored."""
        for wheel in sorted(self.entry(plan).glob("*.whl")):
            recorded = wheel.with_name(f"{wheel.name}.sha256")
            if recorded.is_file() and recorded.read_text() == sha256(wheel) and not _lacking(wheel, plan):
                return wheel
        return None

    def store(self, plan: BuildPlan, built: Path) -> Path:
        """Move a wheel from a work directory to its place, in one step."""
        target = self.entry(plan) / built.name
        if wrong := _lacking(built, plan):
            raise HorovodBuildError(f"Horovod was built, but {wrong}; the log is {target.with_name('build.log')}")
        with built.open("rb") as file:
            os.fsync(file.fileno())  # a rename may reach the disk before the data does
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        built.chmod(0o644)
        target.with_name(f"{target.name}.sha256").write_text(sha256(built))
        os.replace(built, target)
        return target

    @contextmanager
    def locked(self, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Hold the cache's lock, which the kernel drops however the process ends; say so if it must be waited for."""
        for folder in (self.root.parent, self.root):  # whatever the umask
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with (self.root / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                on_wait(f"waiting for another build to end (process {file.read().strip() or 'unknown'})")
                fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """Provide a work directory on the cache's file system, removed at the end. Call it with the lock held."""
        for left_over in self.root.glob("work-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="work-", dir=self.root, ignore_cleanup_errors=True) as path:
            yield Path(path)
