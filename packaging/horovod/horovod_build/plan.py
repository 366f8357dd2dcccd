"""What is to be built, and the name under which the result is cached.

A wheel of Horovod is good for exactly one combination of Horovod, torch, TensorFlow, interpreter and C library, since
its extensions link against the frameworks' own C++ libraries. All of these, and a digest of the patches and of the
build's switches, make the key: whatever changes the wheel changes the key.

Each framework's extension is compiled alone, and has a key of its own: another framework that is installed later adds
its extension to those that are there. They share no objects, because Horovod's core uses Eigen as the framework has it.
Patches of Horovod's Python files are left out of that key: a change in them compiles nothing again.
"""

import hashlib
import importlib.util
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata

from horovod_build.cuda import cuda_variables
from horovod_build.patches import series
from horovod_build.process import HorovodBuildError
from horovod_build.source import HOROVOD_VERSION, SDIST_SHA256

_FRAMEWORKS = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW"}  # Horovod's name for each module
# Gloo needs nothing that is not in the source distribution. MPI would have to be found on the machine.
_DEFAULT_SWITCHES = (("WITH", "GLOO"), ("WITHOUT", "MPI"), ("WITHOUT", "MXNET"))
# Variables of the user's own that change the binary. Horovod's run-time variables (HOROVOD_RANK, HOROVOD_CYCLE_TIME)
# are not among them: the same wheel must be found from inside a job.
_BUILD_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "HOROVOD_CPU_OPERATIONS", "HOROVOD_DEBUG")
_BUILD_PREFIXES = (
    *("CUDA_HOME", "CUDA_PATH", "HOROVOD_WITH_", "HOROVOD_WITHOUT_", "HOROVOD_GPU", "HOROVOD_CUDA", "HOROVOD_NCCL"),
    *("HOROVOD_ROCM", "HOROVOD_BUILD_"),
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
    is_part: bool = False
    """True for what the compiler makes for one framework, before the Python files are patched."""

    @property
    def parts(self) -> tuple["BuildPlan", ...]:
        """What the compiler makes, one framework at a time."""
        return tuple(replace(self, frameworks=(f,), variables=self._only(f), is_part=True) for f in self.frameworks)

    def _only(self, framework: Framework) -> tuple[tuple[str, str], ...]:
        others = {f"HOROVOD_WITH_{f.switch}": f"HOROVOD_WITHOUT_{f.switch}" for f in self.frameworks if f != framework}
        return tuple(sorted((others.get(name, name), value) for name, value in self.variables))

    @property
    def key(self) -> str:
        """The cache's name of this build; equal keys mean interchangeable wheels."""
        patches = [patch.compiled if self.is_part else patch.line for patch in series()]
        recipe = json.dumps([SDIST_SHA256, [text for text in patches if text], self.variables])
        digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
        named = [f"{f.module}-{f.version}" for f in self.frameworks]
        end = ["compiled"] if self.is_part else []
        return "_".join([f"horovod-{HOROVOD_VERSION}", *named, self.python, self.libc, digest, *end])

    @property
    def title(self) -> str:
        """The build in words."""
        return f"Horovod {HOROVOD_VERSION} for " + " and ".join(f"{f.module} {f.version}" for f in self.frameworks)


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def find_frameworks(environ: Mapping[str, str]) -> tuple[Framework, ...]:
    """Return torch and TensorFlow, as far as they are installed here and not switched off by ``HOROVOD_WITHOUT_...``.

    Nothing is imported: TensorFlow alone would take seconds.
    """
    found, distributions = [], metadata.packages_distributions()
    for module, switch in _FRAMEWORKS.items():
        spec = None if environ.get(f"HOROVOD_WITHOUT_{switch}") == "1" else importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:  # no origin: a directory of that name on the path, no package
            version = installed_version(distributions.get(module, [module])[0])  # or tensorflow-cpu, tf-nightly, …
            if version is None:
                raise HorovodBuildError(f"the version of {module} in {spec.origin} is not known; install it by pip")
            found.append(Framework(module, switch, version))
    if not found:
        raise HorovodBuildError(
            f"neither torch nor tensorflow is installed for {sys.executable}, and Horovod is built for what is there; "
            "first run `pip install torch` or `pip install tensorflow` (and unset HOROVOD_WITHOUT_PYTORCH or "
            "HOROVOD_WITHOUT_TENSORFLOW if you had set it)"
        )
    return tuple(found)


def make_plan(frameworks: tuple[Framework, ...], environ: Mapping[str, str]) -> BuildPlan:
    """Combine the defaults with the user's own build variables; where they contradict each other, the user wins."""
    # Horovod takes most empty variables for unset ones, but an empty HOROVOD_CUDA_HOME for the root directory.
    variables = {n: v for n, v in environ.items() if v and (n in _BUILD_VARIABLES or n.startswith(_BUILD_PREFIXES))}
    present = {f.switch for f in frameworks}
    for switch in _FRAMEWORKS.values():
        variables[f"HOROVOD_{'WITH' if switch in present else 'WITHOUT'}_{switch}"] = "1"
    for default, feature in _DEFAULT_SWITCHES:
        opposite = "WITHOUT" if default == "WITH" else "WITH"
        if variables.get(f"HOROVOD_{opposite}_{feature}") != "1":
            variables.setdefault(f"HOROVOD_{default}_{feature}", "1")
    by_mpi = [n for n, v in variables.items() if n.startswith("HOROVOD_GPU_") and v in ("MPI", "DDL")]
    if by_mpi and variables.get("HOROVOD_WITHOUT_MPI") == "1":
        # Horovod would compile, and hand addresses on GPUs to operations on CPUs.
        raise HorovodBuildError(
            f"{by_mpi[0]}={variables[by_mpi[0]]} needs a Horovod with MPI, and it is built without; set "
            f"{by_mpi[0]}=NCCL, or HOROVOD_WITH_MPI=1 where MPI is installed"
        )
    variables["CXXFLAGS"] = f"{variables.get('CXXFLAGS', '')} {_CXXFLAGS}".strip()
    variables |= cuda_variables(variables, environ.get("PATH", os.defpath))
    abi = sysconfig.get_config_var("SOABI") or f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    libc = "".join(platform.libc_ver()) or platform.platform(terse=True)
    return BuildPlan(frameworks, abi, libc, tuple(sorted(variables.items())))
