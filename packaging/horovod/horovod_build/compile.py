"""The build proper: pip makes a wheel of the patched tree, and its output says how far it is."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from horovod_build.plan import BuildPlan
from horovod_build.process import HorovodBuildError, run_logged
from horovod_build.progress import Reporter

_GIB_PER_JOB = 2.0  # a file that includes torch's headers takes gcc about 1.5 GiB
_PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]")
_NO_TOOLKIT = "Could NOT find CUDAToolkit"  # as CMake says it


def default_jobs() -> int:
    """Return how many compilers to run at once: one per core of ours, as far as memory goes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(psutil.virtual_memory().available / 2**30 / _GIB_PER_JOB)))


def build_environment(
    part: BuildPlan, tools: Mapping[str, str], jobs: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the build's variables: the caller's, without what would steer Horovod or make past the plan."""
    kept = {name: value for name, value in environ.items() if not name.startswith(("HOROVOD_", "MAKE", "MFLAGS"))}
    return {**kept, **dict(part.variables), **tools, "MAKEFLAGS": f"-j{jobs}", "PYTHONUNBUFFERED": "1"}


def compile_wheel(part: BuildPlan, tree: Path, environ: Mapping[str, str], log: Path, reporter: Reporter) -> Path:
    """Build the wheel of a patched tree for one framework, beside the tree, and return its path."""
    into, name = tree.parent, part.frameworks[0].module
    compiling = False

    def follow(line: str) -> None:
        nonlocal compiling
        if (match := _PERCENT.match(line)) is not None:
            if not compiling:
                compiling = True
                reporter.stage(f"compile for {name}")
            reporter.percent(int(match[1]))

    reporter.stage(f"configure for {name}")
    # --use-pep517: setuptools would otherwise fetch what setup.py names in setup_requires by itself
    options = ("--verbose", "--no-build-isolation", "--no-deps", "--no-index", "--use-pep517", "--wheel-dir", str(into))
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", *options, str(tree)]
    # Whatever pip and the compilers leave goes with the work directory.
    environ = {**environ, "TMPDIR": str(into)}
    try:
        run_logged(argv, log=log, doing="Horovod did not build", environ=environ, cwd=into, on_line=follow)
    except HorovodBuildError as error:
        if _NO_TOOLKIT not in log.read_text(encoding="utf-8", errors="replace"):
            raise
        why, instead = f"{name} was built for CUDA", f"a {name} for CPUs"
        asking = next((variable for variable, _ in part.variables if variable.startswith("HOROVOD_GPU_")), None)
        if asking is not None:
            why, instead = f"{asking} asks for operations on GPUs", f"unset {asking}"
        raise HorovodBuildError(
            f"{why}, so Horovod needs CUDA's toolkit: install the one of {name}'s version, or {instead}, or "
            f"leave {name} out by HOROVOD_WITHOUT_{part.frameworks[0].switch}=1.\n{error}"
        ) from None
    return next(into.glob("horovod-*.whl"))
