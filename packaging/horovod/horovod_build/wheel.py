"""Make one wheel of what the compiler left for each framework and of the patched Python files, and install it."""

import json
import shutil
import sys
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from horovod_build.patches import RECORD, Patch
from horovod_build.plan import BuildPlan, installed_version
from horovod_build.process import run_logged
from horovod_build.source import sha256

_VERSIONS = "horovod/metadata.json"  # of the frameworks, by name
# What Horovod 0.28.1 imports when it runs. None of these depends on a framework, so that installing one that is missing
# cannot bring another torch or TensorFlow along.
_RUNTIME = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi")


def join_wheels(wheels: Sequence[Path], source: Path, patches: Sequence[Patch], work: Path, log: Path) -> Path:
    """Return a wheel in a work directory with the extensions of all wheels and the source's Python files."""
    tree, packed = work / "unpacked", work / "packed"
    versions: dict[str, str] = {}
    for wheel in reversed(wheels):  # so that the first one's metadata stay: PyTorch's part requires cffi
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tree)
            versions |= json.loads(archive.read(_VERSIONS))
    (tree / _VERSIONS).write_text(json.dumps(versions))
    for file in source.glob("horovod/**/*.py"):
        shutil.copyfile(file, tree / file.relative_to(source))
    (information,) = tree.glob("*.dist-info")
    (information / RECORD).write_text("".join(patch.line for patch in patches))
    packed.mkdir()
    # It writes a RECORD of its own, with the digests of the new files.
    argv, name = [sys.executable, "-m", "wheel", "pack", "--dest-dir", str(packed), str(tree)], wheels[0].name
    run_logged(argv, log=log, doing=f"{name} could not be put together")
    return packed / name


def is_installed(wheel: Path) -> bool:
    """Return True if this very wheel is installed, by the hash that pip recorded."""
    try:
        record = metadata.distribution("horovod").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return False
    archive = json.loads(record or "{}").get("archive_info", {})
    recorded = archive.get("hashes", {}).get("sha256") or archive.get("hash", "").removeprefix("sha256=")
    return bool(recorded == sha256(wheel))


def install(wheel: Path, plan: BuildPlan, log: Path) -> None:
    """Install the wheel, replacing any other Horovod, and such of its requirements as are absent."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install")
    replacing = ("--no-deps", "--no-index", "--force-reinstall")
    run_logged([*pip, *replacing, str(wheel)], log=log, doing=f"pip could not install {wheel.name}")
    needed = [name for name in _RUNTIME if name != "cffi" or any(f.module == "torch" for f in plan.frameworks)]
    if absent := [name for name in needed if installed_version(name) is None]:
        run_logged([*pip, *absent], log=log, doing=f"pip could not install what Horovod needs: {' '.join(absent)}")
