"""The patches of Horovod's source: one purpose each, in the order of ``patches/series``."""

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from horovod_build.process import run_logged

RECORD = "hvd-hetero-patches"
"""The file of a wheel's metadata that lists its patches, as ``sha256sum`` would."""
_FOLDER = Path(__file__).parent / "patches"
_FILE = re.compile(r"^--- a/(.+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch file: its name, what it and its neighbours in the series are for, and its text."""

    name: str
    purpose: str
    text: str

    @property
    def line(self) -> str:
        """The patch's line in a wheel's record."""
        return f"{hashlib.sha256(self.text.encode()).hexdigest()}  {self.name}\n"

    @property
    def compiled(self) -> str:
        """The part of the patch that decides what the compiler makes: all but Horovod's own Python files."""
        _, *parts = _FILE.split(self.text)
        files = zip(parts[::2], parts[1::2], strict=True)
        return "".join(name + text for name, text in files if not re.fullmatch(r"horovod/.*\.py", name))


@cache
def series() -> tuple[Patch, ...]:
    """Return all patches in their order."""
    found, purpose = [], ""
    for line in (_FOLDER / "series").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            purpose = line.removeprefix("#").strip()
        elif line:
            found.append(Patch(line, purpose, (_FOLDER / line).read_text(encoding="utf-8")))
    return tuple(found)


def patch_command(path: str) -> tuple[str, ...]:
    """Return the command that applies a patch file without guessing: by ``patch``, else by ``git``, else nothing."""
    if (patch := shutil.which("patch", path=path)) is not None:
        return patch, "-p1", "-F0", "-N", "-t", "-i"
    return (git, "apply", "-p1") if (git := shutil.which("git", path=path)) is not None else ()


def apply(tree: Path, patches: Sequence[Patch], command: Sequence[str], log: Path) -> None:
    """Apply patches in their order, or raise with the name of the one that does not fit."""
    # In a folder below a repository, git would apply nothing, and call that a success.
    environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    for patch in patches:
        file = tree.parent / patch.name
        file.write_text(patch.text, encoding="utf-8")
        doing = f"{patch.name} does not fit Horovod's source"
        run_logged([*command, str(file)], log=log, doing=doing, environ=environ, cwd=tree)
