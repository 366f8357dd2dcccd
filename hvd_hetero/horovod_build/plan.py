"""What is to be built, and the name under which the result is cached.

A wheel of Horovod is good for exactly one combination of Horovod, torch, TensorFlow, interpreter and C library, since
its extensions link against the frameworks' own C++ libraries. All of these, and a digest of the edits and of the
build's switches, make the key: whatever changes the binary changes the key.

Each framework's extension is compiled alone, and has a key of its own: another framework that is installed later adds
its extension to those that are there. They share no objects, because Horovod's core uses Eigen as the framework has it.
"""

import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hvd_hetero.horovod_build.cuda import cuda_variables
from hvd_hetero.horovod_build.distributions import installed_version
from hvd_hetero.horovod_build.edits import PACKAGE_EDITS, SOURCE_EDITS, Edit
from hvd_hetero.horovod_build.errors import HorovodBuildError
from hvd_hetero.horovod_build.source import HOROVOD_VERSION, SDIST_SHA256

__all__ = ["BuildPlan", "Framework", "find_frameworks", "make_plan"]

# The module, Horovod's name for it, and the distributions that may carry it.
_FRAMEWORKS = (
    ("torch", "PYTORCH", ("torch",)),
    ("tensorflow", "TENSORFLOW", ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly", "tf-nightly-cpu")),
)

# Gloo needs nothing that is not in the source distribution. MPI would have to be found on the machine.
_DEFAULT_SWITCHES = {"HOROVOD_WITH_GLOO": "1", "HOROVOD_WITHOUT_MPI": "1", "HOROVOD_WITHOUT_MXNET": "1"}

# Variables of the user's own that change the binary. Horovod's run-time variables (HOROVOD_RANK, HOROVOD_CYCLE_TIME)
# are not among them: the same wheel must be found from inside a job.
_BUILD_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "HOROVOD_CPU_OPERATIONS", "HOROVOD_DEBUG")
_BUILD_PREFIXES = (
    "CUDA_HOME",
    "CUDA_PATH",
    "HOROVOD_WITH_",
    "HOROVOD_WITHOUT_",
    "HOROVOD_GPU",
    "HOROVOD_CUDA",
    "HOROVOD_NCCL",
    "HOROVOD_ROCM",
    "HOROVOD_BUILD_",
)

# gcc 13 stopped including <cstdint> from other standard headers, which sources of 2023 relied on. Including it
# everywhere needs no list of the files that do, and is harmless to older compilers (it was tried with gcc 12 only).
_CXXFLAGS = "-include cstdint"


@dataclass(frozen=True, slots=True)
class Framework:
    """A deep-learning framework of the running interpreter."""

    module: str
    switch: str
    version: str


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """One build: its frameworks, the interpreter and C library it is for, and the variables that steer it."""

    frameworks: tuple[Framework, ...]
    python: str
    libc: str
    variables: tuple[tuple[str, str], ...]

    @property
    def parts(self) -> tuple["BuildPlan", ...]:
        """What the compiler makes, one framework at a time."""
        return tuple(replace(self, frameworks=(f,), variables=self._variables_for(f)) for f in self.frameworks)

    def _variables_for(self, framework: Framework) -> tuple[tuple[str, str], ...]:
        variables = dict(self.variables)
        for other in self.frameworks:
            if other != framework:
                del variables[f"HOROVOD_WITH_{other.switch}"]
                variables[f"HOROVOD_WITHOUT_{other.switch}"] = "1"
        return tuple(sorted(variables.items()))

    @property
    def key(self) -> str:
        """The cache's name of this build; equal keys mean interchangeable wheels."""
        return self._name(SOURCE_EDITS + PACKAGE_EDITS)

    @property
    def compiled_key(self) -> str:
        """The cache's name of the wheel as the compiler leaves it, which edits of Python files do not change."""
        return self._name(SOURCE_EDITS) + "_compiled"

    def _name(self, edits: tuple[Edit, ...]) -> str:
        recipe = json.dumps([SDIST_SHA256, [[e.path, e.old, e.new] for e in edits], self.variables])
        digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
        named = [f"{f.module}-{f.version}" for f in self.frameworks]
        return "_".join([f"horovod-{HOROVOD_VERSION}", *named, self.python, self.libc, digest])

    @property
    def title(self) -> str:
        """The build in words."""
        return f"Horovod {HOROVOD_VERSION} for " + " and ".join(f"{f.module} {f.version}" for f in self.frameworks)


def find_frameworks(environ: Mapping[str, str]) -> tuple[Framework, ...]:
    """Return torch and TensorFlow, as far as they are installed here and not switched off by ``HOROVOD_WITHOUT_...``.

    Nothing is imported (TensorFlow alone would take seconds) unless an unusual distribution hides its version.
    """
    found = []
    for module, switch, distributions in _FRAMEWORKS:
        if environ.get(f"HOROVOD_WITHOUT_{switch}") == "1":
            continue
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:  # no origin: a directory of that name on the path, not a package
            continue
        found.append(Framework(module, switch, _version(module, distributions)))
    if not found:
        raise HorovodBuildError(
            f"neither torch nor tensorflow is installed for {sys.executable}, and Horovod is built for what is there; "
            "first run `pip install torch` or `pip install tensorflow` (and unset HOROVOD_WITHOUT_PYTORCH or "
            "HOROVOD_WITHOUT_TENSORFLOW if you had set it)"
        )
    return tuple(found)


def _version(module: str, distributions: tuple[str, ...]) -> str:
    for distribution in distributions:
        if (version := installed_version(distribution)) is not None:
            return version
    asked = subprocess.run(
        [sys.executable, "-c", f"import {module}; print({module}.__version__)"],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise HorovodBuildError(f"{module} is installed for {sys.executable} but cannot be imported: {last}")
    return asked.stdout.split()[-1]


def make_plan(frameworks: tuple[Framework, ...], environ: Mapping[str, str]) -> BuildPlan:
    """Combine the defaults with the user's own build variables; where they contradict each other, the user wins."""
    # Horovod takes most empty variables for unset ones, but an empty HOROVOD_CUDA_HOME for the root directory.
    variables = {n: v for n, v in environ.items() if v and (n in _BUILD_VARIABLES or n.startswith(_BUILD_PREFIXES))}
    present = {f.switch for f in frameworks}
    for _, switch, _ in _FRAMEWORKS:
        variables[f"HOROVOD_{'WITH' if switch in present else 'WITHOUT'}_{switch}"] = "1"
    for name, value in _DEFAULT_SWITCHES.items():
        opposite = name.replace("_WITH_", "_WITHOUT_") if "_WITH_" in name else name.replace("_WITHOUT_", "_WITH_")
        if variables.get(opposite) != "1":
            variables.setdefault(name, value)
    if variables.get("HOROVOD_WITHOUT_MPI") == "1":
        _refuse_operations_by_mpi(variables)
    variables["CXXFLAGS"] = f"{variables.get('CXXFLAGS', '')} {_CXXFLAGS}".strip()
    variables |= cuda_variables(variables, environ.get("PATH", os.defpath))
    abi = sysconfig.get_config_var("SOABI") or f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    libc = "".join(platform.libc_ver()) or platform.platform(terse=True)
    return BuildPlan(frameworks, abi, libc, tuple(sorted(variables.items())))


def _refuse_operations_by_mpi(variables: Mapping[str, str]) -> None:
    """Raise if operations ask for MPI, which the build lacks.

    Horovod would compile, and hand the addresses of a GPU's memory to operations on CPUs.
    """
    for name, value in variables.items():
        if name.startswith("HOROVOD_GPU_") and value in ("MPI", "DDL"):
            raise HorovodBuildError(
                f"{name}={value} needs a Horovod with MPI, and it is built without; set {name}=NCCL, or "
                "HOROVOD_WITH_MPI=1 where MPI is installed"
            )
