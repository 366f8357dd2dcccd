"""What a build needs of the machine, looked for before anything is downloaded.

All that is missing is reported at once, each with the package that brings it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from horovod_build.patches import patch_command
from horovod_build.plan import installed_version
from horovod_build.process import HorovodBuildError
from horovod_build.source import HOROVOD_VERSION

_PROBE = "#include <string_view>\n#include <thread>\nint main() { std::thread([] {}).join(); }\n"
_CMAKE_MINIMUM = (3, 13)
# Horovod's build finds the interpreter's headers through distutils, which from Python 3.12 on only setuptools has. The
# bound is the one that the build was verified with; Horovod's setup uses keywords that setuptools is retiring.
_SETUPTOOLS_BELOW = 81


def find_toolchain(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that name the programs of a build, or raise with all that is missing and how to install it.

    The interpreter's own script directory is searched first: it is where ``pip install cmake`` puts CMake, and it is on
    no PATH as long as the environment is not activated.
    """
    path = os.pathsep.join([sysconfig.get_path("scripts"), environ.get("PATH", os.defpath)])
    cc = _compiler("CC", ("cc", "gcc", "clang"), environ, path)
    cxx = _compiler("CXX", ("c++", "g++", "clang++"), environ, path)
    cmake = environ.get("HOROVOD_CMAKE") or shutil.which("cmake", path=path) or ""
    headers, python = Path(sysconfig.get_path("include")), f"{sys.version_info.major}.{sys.version_info.minor}"
    absent = f"the headers of Python {python} (no Python.h in {headers})"
    complaints = (
        (_compiler_complaint(cc, cxx), _install("g++", "gcc-c++")),
        (_cmake_complaint(cmake), f"{_install('cmake', 'cmake')} or {_pip('cmake')}"),
        ("" if shutil.which("make", path=path) else "make", _install("make", "make")),
        ("" if patch_command(path) else "patch, or git", _install("patch", "patch")),
        ("" if (headers / "Python.h").exists() else absent, _install(f"python{python}-dev", f"python{python}-devel")),
        *_package_complaints(),
    )
    missing = [f"{complaint}: {way}" for complaint, way in complaints if complaint]
    if missing:
        listed = "".join(f"\n  - {item}" for item in missing)
        raise HorovodBuildError(f"to build Horovod {HOROVOD_VERSION}, this machine lacks{listed}")
    return {
        "CC": cc,
        "CXX": cxx,
        "HOROVOD_CMAKE": cmake,
        "PATH": path,
        "CMAKE_GENERATOR": "Unix Makefiles",  # Horovod's setup passes make's options on, which ninja rejects
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # gloo asks for 2.8.12, which CMake 4 refuses without this
    }


def _install(debian: str, fedora: str) -> str:
    return f"`apt install {debian}` (Debian, Ubuntu) or `dnf install {fedora}` (Fedora)"


def _pip(package: str) -> str:
    return f"`{sys.executable} -m pip install {shlex.quote(package)}`"


def _compiler(variable: str, names: tuple[str, ...], environ: Mapping[str, str], path: str) -> str:
    if given := environ.get(variable):
        return given if shutil.which(shlex.split(given)[0], path=path) else ""
    return next((found for name in names if (found := shutil.which(name, path=path))), "")


def _compiler_complaint(cc: str, cxx: str) -> str:
    """Compile and link a line of C++17: a compiler without its standard library is found by its name only."""
    if not cc or not cxx:
        return f"a {'C' if cxx else 'C++'} compiler"
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "probe.cc")
        source.write_text(_PROBE)
        argv = [*shlex.split(cxx), "-std=c++17", "-pthread", str(source), "-o", str(Path(directory, "probe"))]
        done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
    return f"a C++17 compiler that works ({cxx} says: {said})" if done.returncode != 0 else ""


def _cmake_complaint(cmake: str) -> str:
    wanted = f"CMake {'.'.join(map(str, _CMAKE_MINIMUM))} or newer"
    if not cmake:
        return wanted
    try:
        said = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as reason:
        said = str(reason)
    if (match := re.search(r"version (\d+)\.(\d+)", said)) is None:
        return f"a CMake that runs ({cmake} --version says {said.strip()[:80]!r})"
    found = (int(match[1]), int(match[2]))
    return "" if found >= _CMAKE_MINIMUM else f"{wanted} ({cmake} is {found[0]}.{found[1]})"


def _package_complaints() -> Iterator[tuple[str, str]]:
    for name in ("pip", "wheel", "packaging"):
        if installed_version(name) is None:
            yield f"the Python package {name}", f"`{sys.executable} -m ensurepip`" if name == "pip" else _pip(name)
    setuptools, requirement = installed_version("setuptools"), f"setuptools<{_SETUPTOOLS_BELOW}"
    if setuptools is None or int(setuptools.split(".")[0]) >= _SETUPTOOLS_BELOW:
        having = "it is absent" if setuptools is None else f"here is {setuptools}"
        yield f"the Python package {requirement} ({having})", _pip(requirement)
