"""Gate: the wheels that would be published are complete and work without this checkout.

A source distribution is built from a copy of the checkout, a wheel from that source distribution, and the wheel is
installed into a fresh environment with only the core's dependencies: links to what is installed here, since to
download and unpack NumPy and SciPy once more takes half a minute. From an empty directory, every module of the core
must import, and the command line must answer. The same is done with the builder of Horovod, which comes to that
environment second: without it, the command line says what is missing. Exit code 0 or 1.
"""

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("hvd_hetero", "torch_hooks", "keras_callbacks")
BUILDER, BUILDER_PACKAGE = "packaging/horovod", "horovod_build"
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__")

# Runs in the fresh environment. sys.argv: where the package must be.
IMPORT_ALL = """
import importlib, pkgutil, sys
import hvd_hetero
assert hvd_hetero.__file__.startswith(sys.argv[1]), hvd_hetero.__file__
names = [module.name for module in pkgutil.walk_packages(hvd_hetero.__path__, "hvd_hetero.")]
for name in names:
    importlib.import_module(name)
for name in ("horovod", "torch", "tensorflow", "keras"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{name} is there: this environment is not bare")
print(len(names))
"""
# The same of the builder, which must have its patches.
IMPORT_BUILDER = """
import sys
import horovod_build
assert horovod_build.__file__.startswith(sys.argv[1]), horovod_build.__file__
print(len(horovod_build.series()))
"""


class GateError(Exception):
    """The gate is closed; the message says why."""


def run(*argv: str, cwd: Path, expected: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command without anything of this environment, and insist on its exit code."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environ = {name: value for name, value in os.environ.items() if name not in hidden} | {"PYTHONNOUSERSITE": "1"}
    done = subprocess.run(argv, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != expected:
        raise GateError(f"{' '.join(argv)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done


def build(source: Path, into: Path) -> Path:
    """Build the wheel from a source distribution."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(into), cwd=source)
    (wheel,) = into.glob("*.whl")
    return wheel


def check_contents(wheel: Path, root: Path, packages: tuple[str, ...]) -> None:
    """Every module and data file of the packages must be inside, with the types' marks and the licence."""
    present = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    wanted = {
        file.relative_to(root).as_posix()
        for package in packages
        for file in (root / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    if absent := sorted(wanted - present):
        raise GateError(f"not in the wheel (see [tool.setuptools] in pyproject.toml): {', '.join(absent)}")
    for package in packages:
        if (root / package).exists() and f"{package}/py.typed" not in present:
            raise GateError(f"{package}/py.typed does not exist")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in present):
        raise GateError("the wheel has no licence")
    if strange := sorted(n for n in present if not n.startswith(packages) and ".dist-info/" not in n):
        raise GateError(f"in the wheel, but of no package: {', '.join(strange)}")


def check_installed(wheel: Path, builder: Path, work: Path) -> tuple[int, int]:
    """Install the wheels elsewhere, use them from an empty directory, and count imported modules and patches."""
    environment, empty = work / "environment", work / "empty"
    empty.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", str(environment), cwd=empty)
    python, command = str(environment / "bin" / "python"), str(environment / "bin" / "hvd-hetero")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-compile", "--no-deps", "--no-index", str(wheel), cwd=empty)
    (packages,) = environment.glob("lib/python*/site-packages")
    link_dependencies(packages)
    run(*pip, "check", cwd=empty)
    imported = int(run(python, "-c", IMPORT_ALL, str(environment.resolve()), cwd=empty).stdout)
    version = run(command, "--version", cwd=empty).stdout.split()
    if version[0] != "hvd-hetero" or f"-{version[1]}-" not in wheel.name:
        raise GateError(f"hvd-hetero --version says {version}, but the wheel is {wheel.name}")
    said = run(command, "build-horovod", "--quiet", cwd=empty, expected=1).stderr
    if "the package hvd-hetero-horovod" not in said or "Traceback" in said:
        raise GateError(f"without its builder, build-horovod must say what to install, but it says:\n{said}")
    run(*pip, "install", "--quiet", "--no-compile", "--no-deps", "--no-index", str(builder), cwd=empty)
    link_dependencies(packages)
    run(*pip, "check", cwd=empty)
    patches = int(run(python, "-c", IMPORT_BUILDER, str(environment.resolve()), cwd=empty).stdout)
    said = run(command, "build-horovod", cwd=empty, expected=1).stderr
    if "neither torch nor tensorflow is installed" not in said or "Traceback" in said:
        raise GateError(f"build-horovod must say in one line that no framework is installed, but it says:\n{said}")
    return imported, patches


def link_dependencies(packages: Path) -> None:
    """Link what the wheels that are installed there require, and what that requires, without any extra."""
    wheels = importlib.metadata.distributions(path=[str(packages)])
    wanted, known = set[str]().union(*map(required_by, wheels)), set[str]()
    while wanted:
        name = wanted.pop()
        if name in known:
            continue
        known.add(name)
        distribution = importlib.metadata.distribution(name)
        wanted |= required_by(distribution)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))


def required_by(distribution: importlib.metadata.Distribution) -> set[str]:
    """Return the names of a distribution's requirements without any extra."""
    requirements = map(Requirement, distribution.requires or ())
    return {each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})}


def main() -> int:
    """Run the gate."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="hvd-hetero-wheel-") as directory:
        work = Path(directory).resolve()
        try:
            source = shutil.copytree(ROOT, work / "source", ignore=NOT_SOURCE)  # without what is generated here
            wheel, builder = build(source, work / "dist"), build(source / BUILDER, work / "builder")
            check_contents(wheel, ROOT, PACKAGES)
            check_contents(builder, ROOT / BUILDER, (BUILDER_PACKAGE,))
            imported, patches = check_installed(wheel, builder, work)
        except GateError as problem:
            print(problem)
            return 1
    print(f"{wheel.name}: {imported} modules imported without the checkout, and the command line answers")
    print(f"{builder.name}: {patches} patches, and the command line finds it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
