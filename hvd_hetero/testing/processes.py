"""The processes of one launched job: find them all, ask them for their stacks, end them all.

horovodrun starts every rank in a separate session, below a middleman and a shell, so neither a process group nor the
tree of children holds the whole job: a process that loses its parent leaves the tree. All keep the
environment that they were started with, and one variable in there names the job's own run directory. (A rank that was
forked from a process with its imports done has the environment of that one; it has left a file in the run directory.)
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from hvd_hetero.testing.rank import RUN_DIR, STACK_SIGNAL, die_with_launcher

_POLL_S = 0.02


def job_processes(run_dir: Path) -> list[psutil.Process]:
    """Return all living processes of the job, whichever parents they have by now."""
    forked = {int(file.name.split(".")[1]): file.stat().st_mtime for file in run_dir.glob("*.stack")}
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # ended meanwhile, or not ours to look into
            named = process.environ().get(RUN_DIR) == str(run_dir)
            if process.pid != os.getpid() and (named or process.create_time() < forked.get(process.pid, 0.0)):
                found.append(process)
    return found


def end_job(run_dir: Path, root: int, patience_s: float = 1.0, limit_s: float = 15.0) -> list[psutil.Process]:
    """Ask all processes of the job to end, and kill those that do not within ``patience_s``; return the unkillable."""
    # A process that ends loses its environment before its files and sockets, so one found once is waited for.
    known: set[psutil.Process] = set()

    def alive() -> list[psutil.Process]:
        known.update(job_processes(run_dir))
        with suppress(psutil.NoSuchProcess):
            known.update([psutil.Process(root), *psutil.Process(root).children(recursive=True)])
        return [process for process in known if _lives(process)]

    begin_s = time.monotonic()
    asked: set[int] = set()
    while processes := alive():
        waited_s = time.monotonic() - begin_s
        if waited_s > limit_s:
            return processes
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                if waited_s > patience_s:
                    process.kill()
                elif process.pid not in asked:
                    process.terminate()
                    asked.add(process.pid)
        time.sleep(_POLL_S)
    return []


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        # One with threads is a zombie as soon as its main thread has ended; its last thread keeps memory and sockets.
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    return False


def stacks(run_dir: Path, patience_s: float = 3.0) -> dict[int, str]:
    """Return what every Python thread of every living rank is doing now, by rank.

    The text of a rank that does not answer (stopped, or starved of processor time) says so.
    """
    living = {process.pid for process in job_processes(run_dir)}
    asked: dict[Path, int] = {}
    for file in sorted(run_dir.glob("[0-9]*.stack")):  # others are of agents
        pid = int(file.name.split(".")[1])
        if pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, STACK_SIGNAL)
                asked[file] = pid
    _await(list(asked), patience_s)
    answers: dict[int, str] = {}
    for file, pid in asked.items():
        rank = int(file.name.split(".")[0])
        answers[rank] = f"pid {pid}\n{_of_the_job(file.read_text(errors='replace')) or 'gave no answer'}"
    return answers


def _of_the_job(dump: str) -> str:
    """Return ``dump`` without the bootstrap's own waiting thread."""
    return "\n\n".join(thread for thread in dump.split("\n\n") if die_with_launcher.__name__ not in thread)


def _await(files: list[Path], patience_s: float, quiet_s: float = 0.2) -> None:
    """Wait until all ``files`` have something in them and none has grown for ``quiet_s``."""
    deadline_s = time.monotonic() + patience_s
    sizes: list[int] = []
    since_s = time.monotonic()
    while time.monotonic() < deadline_s:
        now = [file.stat().st_size for file in files]
        if now != sizes:
            sizes, since_s = now, time.monotonic()
        elif all(sizes) and time.monotonic() - since_s >= quiet_s:
            return
        time.sleep(_POLL_S)
