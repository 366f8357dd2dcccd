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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvd_hetero.horovod_build.distributions import installed_version
from hvd_hetero.horovod_build.errors import HorovodBuildError
from hvd_hetero.horovod_build.source import HOROVOD_VERSION

__all__ = ["Toolchain", "find_toolchain"]

_PROBE = "#include <string_view>\n#include <thread>\nint main() { std::thread([] {}).join(); }\n"
_CMAKE_MINIMUM = (3, 13)
# Horovod's build finds the interpreter's headers through distutils, which from Python 3.12 on only setuptools has. The
# bound is the one that the build was verified with; Horovod's setup uses keywords that setuptools is retiring.
_SETUPTOOLS_BELOW = 81


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The programs that a build is to use."""

    cc: str
    cxx: str
    cmake: str
    make: str

    def variables(self, path: str) -> dict[str, str]:
        """Return the environment variables that make Horovod's setup and CMake use these programs and no others."""
        return {
            "CC": self.cc,
            "CXX": self.cxx,
            "HOROVOD_CMAKE": self.cmake,
            "PATH": path,
            "CMAKE_GENERATOR": "Unix Makefiles",  # Horovod's setup passes make's options on, which ninja rejects
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # gloo asks for 2.8.12, which CMake 4 refuses without this
        }


def find_toolchain(environ: Mapping[str, str]) -> tuple[Toolchain, str]:
    """Return the toolchain and the PATH it was found on, or raise with all that is missing and how to install it.

    The interpreter's own script directory is searched first: it is where ``pip install cmake`` puts CMake, and it is on
    nobody's PATH as long as the environment is not activated.
    """
    path = os.pathsep.join([sysconfig.get_path("scripts"), environ.get("PATH", os.defpath)])
    missing: list[str] = []
    cc = _compiler("CC", ("cc", "gcc", "clang"), environ, path)
    cxx = _compiler("CXX", ("c++", "g++", "clang++"), environ, path)
    if cc is None or cxx is None:
        which = "C++" if cxx is None else "C"
        missing.append(f"a {which} compiler: {_install('g++', 'gcc-c++')}")
    else:
        missing += _probe(cxx)
    cmake = environ.get("HOROVOD_CMAKE") or shutil.which("cmake", path=path)
    if (complaint := _cmake_complaint(cmake)) is not None:
        missing.append(f"{complaint}: {_install('cmake', 'cmake', 'cmake')}")
    if (make := shutil.which("make", path=path)) is None:
        missing.append(f"make: {_install('make', 'make')}")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        missing.append(
            f"the headers of Python {version} (no Python.h in {headers}): "
            f"{_install(f'python{version}-dev', f'python{version}-devel')}"
        )
    missing += _python_packages()
    if missing:
        listed = "".join(f"\n  - {item}" for item in missing)
        raise HorovodBuildError(f"to build Horovod {HOROVOD_VERSION}, this machine lacks{listed}")
    assert cc is not None
    assert cxx is not None
    assert cmake is not None
    assert make is not None
    return Toolchain(cc, cxx, cmake, make), path


def _install(debian: str, fedora: str, pip: str | None = None) -> str:
    ways = f"`apt install {debian}` (Debian, Ubuntu) or `dnf install {fedora}` (Fedora)"
    return ways if pip is None else f"{ways} or `{_pip(pip)}`"


def _pip(*packages: str) -> str:
    return f"{sys.executable} -m pip install " + " ".join(shlex.quote(p) for p in packages)


def _compiler(variable: str, names: tuple[str, ...], environ: Mapping[str, str], path: str) -> str | None:
    if given := environ.get(variable):
        return given if shutil.which(shlex.split(given)[0], path=path) else None
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def _probe(cxx: str) -> list[str]:
    """Compile and link a line of C++17: a compiler without its standard library is found by its name only."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "probe.cc")
        source.write_text(_PROBE)
        argv = [*shlex.split(cxx), "-std=c++17", "-pthread", str(source), "-o", str(Path(directory, "probe"))]
        done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode == 0:
        return []
    said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
    return [f"a C++17 compiler that works ({cxx} says: {said}): {_install('g++', 'gcc-c++')}"]


def _cmake_complaint(cmake: str | None) -> str | None:
    wanted = ".".join(str(n) for n in _CMAKE_MINIMUM)
    if cmake is None:
        return f"CMake {wanted} or newer"
    try:
        said = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as reason:
        return f"a CMake that runs ({cmake}: {reason})"
    match = re.search(r"version (\d+)\.(\d+)", said)
    if match is None:
        return f"a CMake that runs ({cmake} --version says {said.strip()[:80]!r})"
    found = (int(match[1]), int(match[2]))
    return None if found >= _CMAKE_MINIMUM else f"CMake {wanted} or newer ({cmake} is {found[0]}.{found[1]})"


def _python_packages() -> list[str]:
    missing = []
    for name, requirement in (("pip", "pip"), ("wheel", "wheel"), ("packaging", "packaging")):
        if installed_version(name) is None:
            way = f"{sys.executable} -m ensurepip" if name == "pip" else _pip(requirement)
            missing.append(f"the Python package {name}: `{way}`")
    setuptools = installed_version("setuptools")
    if setuptools is None or int(setuptools.split(".")[0]) >= _SETUPTOOLS_BELOW:
        requirement = f"setuptools<{_SETUPTOOLS_BELOW}"
        having = "it is absent" if setuptools is None else f"here is {setuptools}"
        missing.append(f"the Python package {requirement} ({having}): `{_pip(requirement)}`")
    return missing
