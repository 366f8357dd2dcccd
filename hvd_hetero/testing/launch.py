"""Run a script on several ranks of this machine under a watchdog: it ends in time, alone, and says why it failed.

A distributed job does not fail, it hangs: the ranks wait for the one that is lost. So a launch has a time limit, after
which it fails with the stack of every rank. Whatever happens to the job or to the caller, no process of it remains.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_hetero.errors import HeteroError
from hvd_hetero.testing import rank as bootstrap
from hvd_hetero.testing.hosts import HOSTS, Elastic
from hvd_hetero.testing.processes import end_job, stacks
from hvd_hetero.testing.quota import remove_stale_groups

_TAIL_LINES = 100
_LONGEST_LINE = 400  # of a message: frameworks warn in paragraphs
_TRACEBACK = "Traceback (most recent call last):"
_BEGINS = (_TRACEBACK, "Fatal Python error:", "Timeout (")  # the latter two are faulthandler's
_RANKS = r"^\[rank\d+\]: "  # before each line of a traceback, by torch.distributed
_POLL_S = 0.05

KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TOP_PAD_": "67108864",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Environment for ranks whose speeds are compared; set it on all of them.

By default the C library returns the memory of large tensors after each step and asks for it again, page by page. The
time for that depends on the batch size in no simple way. Equal networks also differ in pace by where their pages lie;
huge pages reduce that (glibc 2.35 or newer, if the kernel allows them). See ``docs/cpu.md``.
"""


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """What a job left, one entry per rank; the processes of a rank that was restarted follow one another."""

    ranks: int
    wall_s: float
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]
    reports: tuple[Any, ...]  # of `hvd_hetero.testing.report`; None if a rank made none
    launcher_output: str  # of horovodrun itself


class LaunchError(HeteroError):
    """A launched job failed. ``result`` is what it left."""

    def __init__(self, message: str, result: LaunchResult) -> None:
        super().__init__(message)
        self.result = result


class HangError(LaunchError):
    """The job outlived its time limit. ``stacks`` shows what each living rank was doing; so does the message."""

    def __init__(self, message: str, result: LaunchResult, stacks: Mapping[int, str]) -> None:
        super().__init__(message, result)
        self.stacks = dict(stacks)


class RankError(LaunchError):
    """A rank failed. ``exit_codes`` lists the ranks that did not end with 0, in the order in which they ended.

    A code is minus the signal's number for a rank that a signal ended; the ranks after the first were as a rule ended
    by horovodrun (SIGTERM). The message has the last lines of each rank's standard error.
    """

    def __init__(self, message: str, result: LaunchResult, exit_codes: Mapping[int, int]) -> None:
        super().__init__(message, result)
        self.exit_codes = dict(exit_codes)


def launch(
    script_or_module: str | os.PathLike[str],
    ranks: int,
    args: Sequence[object] = (),
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
    *,
    options: Sequence[str] = (),
    starter: Sequence[str] = (),
    on_line: Callable[[int, str], None] | None = None,
    elastic: Elastic | None = None,
) -> LaunchResult:
    """Run a script (a path that ends in .py) or a module on ``ranks`` ranks by horovodrun, and wait for its end.

    ``env`` adds to this process's environment and overrides what is set here; ``options`` are given to horovodrun
    (with ``--host-discovery-script`` among them the hosts are left to it). ``starter`` is a command that replaces
    horovodrun and its options. The command of a rank is appended to it; exit codes are known for ranks for
    which it prints "Process N exit with status code M", as horovodrun does, or torchrun's table. ``torchrun(ranks)`` is
    one for jobs without Horovod. ``on_line(rank, line)`` is called, in this
    thread, with each line that a rank prints, while it runs. Raises `HangError` or `RankError`.

    With ``elastic`` ranks may be lost and may join (`hvd_hetero.testing.hosts`); the job then succeeds if the ranks of
    the last membership do.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks!r}")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")
    if starter and (options or elastic is not None):
        raise ValueError("starter takes the place of horovodrun: give it without options and elastic")
    target = os.fspath(script_or_module)
    if target.endswith(".py") and not Path(target).is_file():
        raise ValueError(f"script_or_module must name an existing script or a module, and there is no file {target!r}")
    program = [os.path.abspath(target)] if target.endswith(".py") else ["-m", target]
    found = elastic is not None or "--host-discovery-script" in options
    hosts = [] if found else ["-H", f"localhost:{ranks}"]
    # The interface is named because without it horovodrun looks for common ones, which needs a network to look at.
    horovodrun = list(starter)
    if not starter:
        horovodrun = [horovodrun_of(python), "-np", str(ranks), "--gloo", *hosts, "--network-interface", "lo", *options]

    with tempfile.TemporaryDirectory(prefix="hvd-hetero-run-", ignore_cleanup_errors=True) as directory:
        run_dir = Path(directory)
        if elastic is not None:
            horovodrun += elastic.options(run_dir, ranks)
            env = {HOSTS: str(run_dir / "hosts"), **elastic.environment, **(env or {})}
        environment = bootstrap.environment(env)
        environment |= {bootstrap.RUN_DIR: str(run_dir), bootstrap.LAUNCHER_PID: str(os.getpid())}
        command = [python, bootstrap.__file__, "--exec", *horovodrun]
        command += [python, bootstrap.__file__, *program, *map(str, args)]
        follower = _Follower(run_dir, on_line)
        what_they_did: dict[int, str] | None = None
        begin_s = time.monotonic()
        with open(run_dir / bootstrap.LOG, "ab") as log:  # to which agents append, too
            job = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True,  # a Ctrl-C in the terminal is for the caller, who then ends the job below
            )  # fmt: skip
        try:
            while job.poll() is None and what_they_did is None:
                time.sleep(_POLL_S)
                follower.look()
                if time.monotonic() - begin_s > timeout_s:
                    what_they_did = stacks(run_dir)
        finally:
            survivors = end_job(run_dir, job.pid)
            if not survivors:
                job.wait()
            remove_stale_groups()  # of ranks that were killed while they held a quota
        wall_s = time.monotonic() - begin_s
        follower.look()
        result = _collect(run_dir, ranks, wall_s)
    name = f"{Path(target).name if target.endswith('.py') else target} on {ranks} ranks"
    if survivors:
        name += f" (these processes cannot be killed: {survivors})"
    if what_they_did is not None:
        raise HangError(_hang_message(name, timeout_s, result, what_they_did), result, what_they_did)
    if job.returncode != 0:
        codes = _exit_codes(result.launcher_output)
        raise RankError(_failure_message(name, job.returncode, result, codes), result, codes)
    return result


def torchrun(ranks: int, python: str = sys.executable) -> list[str]:
    """Return a ``starter`` for `launch` that starts ranks for ``torch.distributed``, and needs no Horovod."""
    options = ["--standalone", "--nproc-per-node", str(ranks), "--no-python"]
    return [python, bootstrap.__file__, bootstrap.AGENT, "-m", "torch.distributed.run", *options]


def horovodrun_of(python: str) -> str:
    """Return the path of the horovodrun that belongs to this interpreter."""
    beside = Path(python).parent / "horovodrun"  # not resolved: an environment's python is a link out of it
    found = str(beside) if beside.is_file() else shutil.which("horovodrun")
    if found is None:
        raise FileNotFoundError(
            f"horovodrun is neither beside {python} nor on the PATH; install Horovod there (hvd-hetero build-horovod)"
        )
    return found


class _Follower:
    """Calls back with every whole line that ranks have printed to standard output since the last look."""

    def __init__(self, run_dir: Path, on_line: Callable[[int, str], None] | None) -> None:
        self._run_dir = run_dir
        self._on_line = on_line
        self._read_to: dict[Path, int] = {}

    def look(self) -> None:
        if self._on_line is None:
            return
        for path in sorted(self._run_dir.glob("*.stdout")):
            with open(path, "rb") as file:
                file.seek(self._read_to.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read_to[path] = self._read_to.get(path, 0) + len(whole) + len(newline)
            for line in (whole + newline).decode(errors="replace").splitlines():
                self._on_line(int(path.name.split(".")[0]), line)


def _collect(run_dir: Path, ranks: int, wall_s: float) -> LaunchResult:
    def texts(kind: str) -> list[list[str]]:
        kept: list[list[str]] = [[] for _ in range(ranks)]
        for path in sorted(run_dir.glob(f"*.{kind}"), key=lambda path: path.stat().st_mtime):
            rank = int(path.name.split(".")[0])
            kept += [[] for _ in range(rank + 1 - len(kept))]  # an elastic job may have grown
            kept[rank].append(path.read_text(encoding="utf-8", errors="replace"))
        return kept

    return LaunchResult(
        ranks=ranks,
        wall_s=wall_s,
        stdout=tuple("".join(parts) for parts in texts("stdout")),
        stderr=tuple("".join(parts) for parts in texts("stderr")),
        reports=tuple(json.loads(parts[-1]) if parts else None for parts in texts("report")),
        launcher_output=(run_dir / bootstrap.LOG).read_text(errors="replace"),
    )


def _exit_codes(launcher_output: str) -> dict[int, int]:
    """Return the exit codes that horovodrun prints, in order; a shell's 128 + n becomes -n, as Python has it.

    Torchrun has a table instead, with the rank that failed first at its end.
    """
    said = re.findall(r"^Process (\d+) exit with status code (-?\d+)", launcher_output, re.MULTILINE)
    table = re.findall(r"^ *rank +: (\d+) .*\n *exitcode +: (-?\d+)", launcher_output, re.MULTILINE)
    said += table[-1:] + table[:-1]
    signals = {128 + number: -number for number in signal.Signals}  # 255, of sys.exit(-1), is no signal's
    return {int(rank): signals.get(int(code), int(code)) for rank, code in said}


def _hang_message(name: str, timeout_s: float, result: LaunchResult, answers: Mapping[int, str]) -> str:
    parts = [f"{name}: not done after {timeout_s:g} s, and ended. What each rank was doing:"]
    for rank in sorted({*range(result.ranks), *answers}):
        parts.append(f"--- rank {rank}: {answers.get(rank, 'no process; it ended, or never started')}")
        parts.append(_tail(f"rank {rank}, standard error", result.stderr[rank]))
    if not answers:
        parts.append(_tail("horovodrun", result.launcher_output))
    return "\n".join(filter(None, parts))


def _failure_message(name: str, returncode: int, result: LaunchResult, codes: Mapping[int, int]) -> str:
    """Return the error's text, with the first rank that failed last: a viewer of a part of a log sees its end."""
    raised = {rank: _raised(result.stderr[rank]) for rank in codes}
    ends = [f"rank {rank} {_said(code)}{raised[rank] and f' ({raised[rank]})'}" for rank, code in codes.items()]
    parts = [f"{name}: failed; {', then '.join(ends) or f'horovodrun {_said(returncode)}'}"]
    if not any(list(raised.values())[:1]):  # it may have failed before it could print, or its stand-in has failed
        parts.append(_tail("horovodrun", result.launcher_output))
    parts += [_tail(f"rank {rank}, standard error", result.stderr[rank]) for rank in reversed(codes)]
    return "\n".join(filter(None, parts))


def _said(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _raised(stderr: str) -> str:
    """Return the line below the last traceback, which names the exception."""
    _, found, after = re.sub(_RANKS, "", stderr, flags=re.MULTILINE).rpartition(_TRACEBACK)
    message_lines = [line for line in after.splitlines() if line and not line[0].isspace()]
    return message_lines[0][:_LONGEST_LINE] if found and message_lines else ""


def _tail(title: str, text: str) -> str:
    """Return the last lines; if the last traceback or crash is above them, as many lines from there on come first."""
    lines = [
        line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + " […]" for line in text.strip().splitlines()
    ]
    if not lines:
        return ""
    if len(lines) <= _TAIL_LINES:
        return "\n".join([f"--- {title}:", *lines])
    begins = [number for number, line in enumerate(lines) if line.startswith(_BEGINS)]
    above = lines[begins[-1] : -_TAIL_LINES][:_TAIL_LINES] if begins else []
    gap = ["[…]"] if above and begins[-1] + len(above) < len(lines) - _TAIL_LINES else []
    return "\n".join([f"--- {title} (last {_TAIL_LINES} of {len(lines)} lines):", *above, *gap, *lines[-_TAIL_LINES:]])
