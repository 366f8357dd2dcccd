"""Judge an installation: each function takes facts and returns a finding.

A failure means that training cannot run. A warning means that it runs, but slower, or less safely, than it could; or
that it runs with PyTorch alone. Two ranks that sum a vector are the one check that all parts work together: Horovod
launches them and sums; for ``torch.distributed``, which needs no Horovod, torchrun and Gloo do.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from hvd_hetero.testing.launch import KEEP_MEMORY, HangError, LaunchError, LaunchResult, RankError, launch, torchrun
from hvd_hetero.tools.cli.installed import HorovodFacts

BUILD = "hvd-hetero build-horovod --install"
_OLDEST_PYTHON = (3, 11)
_KEPT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
# With less of a container's memory free, a larger batch may end it (arbitrary).
_FREE_WARNED_BELOW = 0.1
_GIB = 2**30
_RANKS, _LENGTH = 2, 1000
_ALONE = "torch.distributed"
_TORCH = "pip install --force-reinstall torch"
_PROGRAMS = {
    "torch": f"""
import torch
import horovod.torch as hvd
hvd.init()
summed = hvd.allreduce(torch.full(({_LENGTH},), hvd.rank() + 1.0), op=hvd.Sum, name="check")
print("sum", len(summed), float(summed.min()), float(summed.max()))
""",
    _ALONE: f"""
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
summed = torch.full(({_LENGTH},), dist.get_rank() + 1.0)
dist.all_reduce(summed)
print("sum", len(summed), float(summed.min()), float(summed.max()))
dist.destroy_process_group()
""",
    "tensorflow": f"""
import tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
summed = hvd.allreduce(tf.fill([{_LENGTH}], hvd.rank() + 1.0), op=hvd.Sum, name="check")
print("sum", len(summed), float(tf.reduce_min(summed)), float(tf.reduce_max(summed)))
""",
}
_EXPECTED = f"sum {_LENGTH} 3.0 3.0"
# Without GPUs: two ranks may share one, which NCCL refuses.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
_ERROR_LETTERS = 200

Grade: TypeAlias = Literal["ok", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table; ``command`` is what to run if there is something to mend."""

    name: str
    verdict: Grade
    text: str
    command: str = ""


def python(version: tuple[int, ...]) -> Finding:
    """Judge whether the interpreter is new enough."""
    shown = ".".join(map(str, version[:3]))
    if version[:2] < _OLDEST_PYTHON:
        return Finding("Python", "failure", f"{shown}; 3.11 or newer is needed", "apt install python3.11-venv")
    return Finding("Python", "ok", shown)


def tools(complaint: str, *, needed: bool) -> Finding:
    """Judge the compiler and what else builds Horovod; ``complaint`` is empty if all is there."""
    if not complaint:
        return Finding("compiler", "ok", "C++17, CMake, make and Python's headers are here")
    items = [line.removeprefix("  - ") for line in complaint.splitlines()[1:]] or [complaint]
    text = "; ".join(item.partition(": ")[0] for item in items)
    ways = [item.split("`")[1] for item in items if item.count("`") >= 2]
    command = " && ".join(dict.fromkeys(ways)) or "hvd-hetero build-horovod --check-tools"
    if needed:
        return Finding("compiler", "failure", f"Horovod has to be built, and this is missing: {text}", command)
    return Finding("compiler", "warning", f"this is missing if Horovod is to be built here: {text}", command)


def frameworks(installed: Mapping[str, str]) -> Finding:
    """Judge whether there is a framework to train with."""
    if not installed:
        return Finding("frameworks", "failure", "neither torch nor tensorflow is installed", "pip install torch")
    return Finding("frameworks", "ok", ", ".join(f"{name} {version}" for name, version in installed.items()))


def horovod(facts: HorovodFacts, installed: Mapping[str, str]) -> Finding:
    """Judge whether Horovod is there, and its extensions were compiled against the installed frameworks.

    PyTorch does without Horovod: torchrun launches its ranks, and torch.distributed sums.
    """
    if facts.version is None:
        if "torch" in installed:
            return Finding("Horovod", "warning", "not installed; PyTorch trains with torchrun, Keras needs it", BUILD)
        return Finding("Horovod", "failure", "not installed", BUILD)
    built = [name for name in installed if name in facts.built_for]
    if not built:
        wanted = " or ".join(installed) or "any framework"
        return Finding("Horovod", "failure", f"{facts.version}, not built for {wanted}", BUILD)
    for name in built:
        against = facts.built_for[name]
        if against and not _same_version(against, installed[name]):
            text = f"{facts.version}, built for {name} {against}, but {installed[name]} is installed"
            return Finding("Horovod", "failure", text, f"{BUILD} --force")
    text = f"{facts.version}, built for {' and '.join(built)}"
    if lacking := [name for name in installed if name not in built]:
        return Finding("Horovod", "warning", f"{text}, not for {' and '.join(lacking)}", BUILD)
    return Finding("Horovod", "ok", text)


def _same_version(one: str, other: str) -> bool:
    """Return whether versions are equal; the local part (``+cu126``) counts only if both have one."""
    (public, _, local), (other_public, _, other_local) = one.partition("+"), other.partition("+")
    return public == other_public and (not local or not other_local or local == other_local)


def horovod_operations(facts: HorovodFacts, gpus: int) -> Finding:
    """Judge the operations: Gloo launches jobs without MPI and elastic ones; NCCL moves gradients between GPUs."""
    has = ", ".join(facts.operations) or "none"
    if "Gloo" not in facts.operations:
        return Finding("operations", "warning", f"{has}; without Gloo there are no elastic jobs", f"{BUILD} --force")
    if gpus and "NCCL" not in facts.operations:
        text = f"{has}; {gpus} GPUs are here, and without NCCL gradients travel through the hosts' memory"
        return Finding("operations", "warning", text, f"HOROVOD_GPU_OPERATIONS=NCCL {BUILD} --force")
    return Finding("operations", "ok", has)


def horovod_patches(facts: HorovodFacts) -> Finding:
    """Judge whether ``build-horovod`` made this one, with all of its patches."""
    if not facts.lacks:
        return Finding("patches", "ok", "made by hvd-hetero build-horovod, with all of its patches")
    kind = "made by an earlier build-horovod" if facts.is_patched else "a stock Horovod"
    return Finding("patches", "warning", f"{kind}; it lacks: {'; '.join(facts.lacks)}", f"{BUILD} --force")


def keras(versions: Mapping[str, str], environ: Mapping[str, str], backend: str = "tensorflow") -> Finding:
    """Judge which Keras ``fit`` runs on, and what that means for Horovod."""
    if "tensorflow" not in versions:
        return Finding("Keras", "ok", "not used: TensorFlow is not installed")
    if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        if "tf_keras" not in versions:
            text = "TF_USE_LEGACY_KERAS is set, and tf_keras is not installed"
            return Finding("Keras", "failure", text, "pip install tf_keras")
        return Finding("Keras", "ok", f"tf_keras {versions['tf_keras']} (TF_USE_LEGACY_KERAS)")
    if "keras" not in versions:
        return Finding("Keras", "failure", "TensorFlow is installed without Keras", "pip install 'keras>=3'")
    version = versions["keras"]
    trains: Grade = "warning" if "torch" in versions else "failure"
    rest = "; only PyTorch trains here" if "torch" in versions else ""
    if version.startswith("2."):
        text = f"{version}; keras_callbacks needs Keras 3 with TensorFlow 2.16 or newer, or tf_keras{rest}"
        return Finding("Keras", trains, text, "pip install 'tensorflow>=2.16' 'keras>=3'")
    if backend != "tensorflow":
        text = f"{version} on {backend}; keras_callbacks needs the TensorFlow backend{rest}"
        return Finding("Keras", trains, text, "export KERAS_BACKEND=tensorflow")
    text = f"{version}: use keras_callbacks.LoadBalance, since Horovod's own DistributedOptimizer synchronises nothing"
    return Finding("Keras", "ok", text)


def container(quota: float, machine_cores: int, memory_limit: float, memory_used: float, ranks: int) -> Finding:
    """Judge the limits that a container sets; infinite if it sets none."""
    limits = []
    if quota < machine_cores:
        limits.append(f"CPU limited to {quota:.3g} of {machine_cores} cores")
    if memory_limit < math.inf:
        limits.append(f"memory limited to {memory_limit / _GIB:.3g} GiB, {memory_used / _GIB:.3g} used")
    text = ", ".join(limits) or "no limits"
    if quota < min(ranks, machine_cores):
        text += f": {ranks} ranks are stopped for parts of every 100 ms (Kubernetes: raise resources.limits.cpu)"
        return Finding("container", "warning", text, f"docker update --cpus {min(ranks, machine_cores)} CONTAINER")
    if memory_used > (1 - _FREE_WARNED_BELOW) * memory_limit:
        command = f"docker update --memory {math.ceil(2 * memory_limit / _GIB)}g CONTAINER"
        return Finding("container", "warning", f"{text}: less than {_FREE_WARNED_BELOW:.0%} is free", command)
    return Finding("container", "ok", text)


def cores(usable: int, ranks: int) -> Finding:
    """Judge whether each rank has its own core."""
    if ranks > usable:
        text = f"{usable} for {ranks} ranks; ranks that share a core slow each other down"
        return Finding("cores", "warning", text, f"horovodrun -np {usable} …")
    return Finding("cores", "ok", f"{usable} for {ranks} ranks")


def threads(setting: str, usable: int, ranks: int) -> Finding:
    """Judge whether the threads of all ranks fit onto the cores."""
    command = f"export OMP_NUM_THREADS={max(usable // ranks, 1)}"
    if not setting:
        if ranks == 1:
            return Finding("threads", "ok", f"OMP_NUM_THREADS is not set: one rank uses all {usable} cores")
        text = f"OMP_NUM_THREADS is not set: each of {ranks} ranks starts a thread for each of {usable} cores"
        return Finding("threads", "ok" if usable == 1 else "warning", text, "" if usable == 1 else command)
    first = setting.partition(",")[0].strip()
    if not first.isdigit() or not int(first):
        text = f"OMP_NUM_THREADS must be a whole number above 0, and is {setting!r}"
        return Finding("threads", "warning", text, command)
    if ranks * int(first) > max(usable, ranks):
        return Finding("threads", "warning", f"{first} for each of {ranks} ranks, on {usable} cores", command)
    return Finding("threads", "ok", f"{first} for each of {ranks} ranks")


def allocator(environ: Mapping[str, str], libc: str) -> Finding:
    """Judge whether freed memory stays with the process (``docs/cpu.md``)."""
    command = "export " + " ".join(f"{name}={KEEP_MEMORY[name]}" for name in _KEPT)
    preloaded = environ.get("LD_PRELOAD", "")
    if other := next((name for name in _OTHER_ALLOCATORS if name in preloaded), None):
        return Finding("allocator", "ok", f"{other}, by LD_PRELOAD")
    if libc != "glibc":
        return Finding("allocator", "ok", f"the one of {libc or 'an unknown C library'}, for which there is no advice")
    if missing := [name for name in _KEPT if not environ.get(name)]:
        text = f"glibc returns freed memory, so step times jump with the batch size (not set: {', '.join(missing)})"
        return Finding("allocator", "warning", text, command)
    return Finding("allocator", "ok", "glibc keeps freed memory in the process")


def two_ranks(
    framework: str, timeout_s: float, launcher: Callable[..., LaunchResult] = launch, python: str = sys.executable
) -> Finding:
    """Launch the ranks and judge their output."""
    with tempfile.TemporaryDirectory(prefix="hvd-hetero-check-") as folder:
        script = Path(folder, "sum_of_two.py")
        script.write_text(_PROGRAMS[framework])
        starter = torchrun(_RANKS, python) if framework == _ALONE else []
        try:
            found = launcher(script, _RANKS, timeout_s=timeout_s, env=_ENVIRONMENT, python=python, starter=starter)
        except (LaunchError, OSError) as error:
            return judge(framework, error, timeout_s)
    return judge(framework, found.stdout, timeout_s)


def judge(framework: str, outcome: tuple[str, ...] | Exception, timeout_s: float) -> Finding:
    """Return the finding for what two ranks printed, or for why they did not."""
    name = f"two ranks, {framework}"
    with_horovod = framework != _ALONE
    module = f"horovod.{framework}" if with_horovod else framework
    if isinstance(outcome, HangError):
        text = f"not done after {timeout_s:g} s; does a firewall stop connections of this machine to itself?"
        return Finding(name, "failure", text, f"hvd-hetero check --timeout {4 * timeout_s:g}")
    if isinstance(outcome, RankError):
        text = str(outcome).splitlines()[0].partition("failed; ")[2][:_ERROR_LETTERS]
        return Finding(name, "failure", text, f"{sys.executable} -c 'import {module}'")
    if isinstance(outcome, Exception):
        return Finding(
            name, "failure", str(outcome).splitlines()[0][:_ERROR_LETTERS], BUILD if with_horovod else _TORCH
        )
    if any(_EXPECTED not in said for said in outcome) or len(outcome) != _RANKS:
        said = " and ".join(repr(text.strip()[-60:]) for text in outcome)
        text = f"the sum must be {_EXPECTED!r} on both, and is {said}"
        return Finding(name, "failure", text, f"{BUILD} --force" if with_horovod else _TORCH)
    return Finding(name, "ok", f"sum a vector of {_LENGTH} numbers")
