"""Put the wheel into the running environment."""

import json
import sys
from importlib import metadata
from pathlib import Path

from hvd_hetero.horovod_build.distributions import installed_version
from hvd_hetero.horovod_build.plan import BuildPlan
from hvd_hetero.horovod_build.process import run_logged
from hvd_hetero.horovod_build.source import sha256

__all__ = ["install", "is_installed"]

# What Horovod 0.28.1 imports when it runs. None of these depends on a framework, so that installing one that is missing
# cannot bring another torch or TensorFlow along.
_RUNTIME = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi")


def is_installed(wheel: Path) -> bool:
    """Return whether this very wheel is what is installed, by the hash that pip recorded."""
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
    run_logged(
        [*pip, "--no-deps", "--no-index", "--force-reinstall", str(wheel)],
        log=log,
        doing=f"pip could not install {wheel.name}",
    )
    needed = [name for name in _RUNTIME if name != "cffi" or any(f.module == "torch" for f in plan.frameworks)]
    if absent := [name for name in needed if installed_version(name) is None]:
        run_logged([*pip, *absent], log=log, doing=f"pip could not install what Horovod needs: {' '.join(absent)}")
