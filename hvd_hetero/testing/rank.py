"""The first code of every rank that `hvd_hetero.testing.launch` starts: make it observable and mortal, then run it.

Run as ``python rank.py [-m module | script] arguments...``, by its path and with the standard library only: as ``-m
hvd_hetero.testing.rank`` every rank would import the package before the job's own first imports.

The run directory, named by ``HVD_HETERO_RUN_DIR``, gets one file of each kind per process, ``<rank>.<pid>.<kind>``:
stdout and stderr, by redirecting the descriptors themselves, so that output of C++ code is in them and a killed rank
loses none (``horovodrun --output-filename`` fails for a single rank, and mixes its own lines into them); stack, which
SIGUSR1 fills; and report. The process is part of the name, because elastic jobs start a rank more than once.

If ``HVD_HETERO_PRELOADED`` names a file, its function ``stand_in`` takes over: the rank is a fork of a process that has
its imports done, and this process only stands in for it, as in the project's own tests (``tests/support/preload.py``).
The same goes for torchrun's agent, as ``python rank.py --agent -m torch.distributed.run ...``, which would import
PyTorch, and for horovodrun. They are no ranks, and write to the same file as the launcher's child.
"""

import contextlib
import ctypes
import faulthandler
import glob
import importlib.util
import os
import runpy
import select
import signal
import sys
import threading
from collections.abc import Mapping

RUN_DIR = "HVD_HETERO_RUN_DIR"
LAUNCHER_PID = "HVD_HETERO_LAUNCHER_PID"
PRELOADED = "HVD_HETERO_PRELOADED"
AGENT, HOROVODRUN = "--agent", "horovodrun"
LOG = "launcher"
"""The file in the run directory with the output of the launcher and its agents."""
STACK_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1


def environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment of every process of a job: ours, ``env``, and this file's checkout or site-packages."""
    whole = dict(os.environ)
    whole |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        # Ranks on a busy machine may be half a minute apart when they first meet; the default of 30 s is too near.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
    }
    whole |= env or {}
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return whole | {"PYTHONPATH": os.pathsep.join(filter(None, [root, whole.get("PYTHONPATH", "")]))}


def run_file(kind: str) -> str:
    """Return the path of this rank's file of ``kind`` in the run directory."""
    rank = os.environ.get("HOROVOD_RANK") or os.environ.get("RANK", "0")  # of horovodrun, or of torchrun
    return os.path.join(os.environ[RUN_DIR], f"{rank}.{os.getpid()}.{kind}")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Survives ``exec``; children do not inherit it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def die_with_launcher(launcher: int) -> None:
    """Wait, in a separate thread, for the launcher to end (``launcher`` is its pidfd), and follow it."""
    # Between it and this process stand horovodrun, a middleman and a shell. By itself that chain takes over five
    # seconds to come down, since the middlemen ask politely first.
    select.select([launcher], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def holds(path: str, name: bytes) -> bool:
    """Return whether a file has ``name`` in it."""
    with open(path, "rb") as file:
        return name in file.read()


def gloo_built(verbose: bool = False) -> bool:
    """Return whether Gloo's class is in Horovod's extensions. ``verbose`` is there because horovodrun gives it."""
    horovod = importlib.util.find_spec("horovod")
    folders = horovod.submodule_search_locations if horovod is not None else None
    extensions = (path for folder in folders or () for path in glob.glob(f"{glob.escape(folder)}/*/mpi_lib*.so"))
    return any(holds(path, b"14GlooController") for path in extensions)


def become(command: list[str]) -> None:
    """Become ``command``; Horovod's own launcher runs as a fork, or in this very process."""
    script = command[0]
    if os.path.basename(script) == HOROVODRUN and holds(script, b"horovod.runner.launch") and gloo_built():
        if PRELOADED in os.environ:
            stand_in(os.environ[PRELOADED], [AGENT, *command])
        run_horovodrun(command)
    else:
        os.execv(script, command)


def run_horovodrun(command: list[str]) -> None:
    """Run Horovod's launcher, with `gloo_built` in place of its own, and end this process."""
    from horovod.runner import launch

    # A released one asks the same by importing all frameworks, which costs every launch eight seconds.
    launch.gloo_built = gloo_built
    sys.path[0], sys.argv = os.path.dirname(command[0]), command
    # The middleman of each rank runs the file of the main module again, which would import the whole launcher, a
    # seventh of a second of a processor for each rank. So the main module has no file here.
    vars(sys.modules["__main__"]).pop("__file__", None)
    sys.exit(launch.run_commandline())


def run(arguments: list[str]) -> None:
    """Prepare this process, then become the script or module that ``arguments`` name."""
    agent = arguments[0] == AGENT
    arguments = arguments[agent:]
    log = os.path.join(os.environ[RUN_DIR], LOG)
    for kind, descriptor in (("stdout", 1), ("stderr", 2)):
        file = os.open(log if agent else run_file(kind), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    stack_file = f"{log}.{os.getpid()}.stack" if agent else run_file("stack")
    # The interpreter's own handler runs no bytecode, so it answers though the main thread be deep in a Horovod call.
    stack = open(f"{stack_file}.new", "w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    # Only now, because before the handler is there the signal would kill.
    os.rename(stack.name, stack_file)
    die_with_parent()
    with contextlib.suppress(OSError):  # no pidfd (before Linux 5.3, or a sandbox): the chain of parents does it, later
        launcher = os.pidfd_open(int(os.environ[LAUNCHER_PID]))
        threading.Thread(target=die_with_launcher, args=(launcher,), name="die-with-launcher", daemon=True).start()

    if agent and os.path.basename(arguments[0]) == HOROVODRUN:
        run_horovodrun(arguments)
    elif arguments[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def stand_in(preloaded: str, arguments: list[str]) -> None:
    """Leave the rank to a file's function ``stand_in``; ``preloaded`` names the file, and its argument."""
    die_with_parent()
    file, _, given = preloaded.partition(os.pathsep)
    runpy.run_path(file)["stand_in"](given, arguments)


if __name__ == "__main__":
    if sys.argv[1] == "--exec":  # the launcher's own child is horovodrun, which must not outlive the launcher either
        die_with_parent()
        if os.getppid() != int(os.environ[LAUNCHER_PID]):  # it ended before the kernel was asked
            sys.exit("the launcher has ended")
        become(sys.argv[2:])
    if sys.argv[1] == AGENT and PRELOADED not in os.environ:
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    if PRELOADED in os.environ:  # which the ranks of an agent need, too
        stand_in(os.environ[PRELOADED] if sys.argv[1] == AGENT else os.environ.pop(PRELOADED), sys.argv[1:])
    run(sys.argv[1:])
