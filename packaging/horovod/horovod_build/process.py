"""Subprocesses whose whole output goes to a log, and which never outlive the call; and the error where one fails."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_TAIL_LINES = 15
_ERROR_LINES = 6
_LINES_OF_CMAKE = 3  # the first says where, and those below it what is wrong
_GRACE_S = 5.0


class HorovodBuildError(Exception):
    """Horovod cannot be built here; the message names what is missing, or where the log of the failed build is."""


def run_logged(
    argv: Sequence[str],
    *,
    log: Path,
    doing: str,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> None:
    """Run a command, append its output to ``log``, and raise with the log's last lines where it fails.

    The command leads its own process group, so that an interrupted build takes its compilers along.
    """
    with log.open("a", encoding="utf-8", errors="replace") as file:
        file.write("$ " + " ".join(argv) + "\n")
        file.flush()
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
            errors="replace", env=environ, cwd=cwd, start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                on_line(line)
            code = process.wait()
        finally:
            _end_group(process)
    if code != 0:
        raise HorovodBuildError(f"{doing} (exit code {code}). The log ends with\n{_tail(log)}\nAll of it is in {log}")


def _end_group(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                continue


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    # With several compilers at work, the message that matters may stand far above make's last word.
    errors: list[str] = []
    for number, line in enumerate(lines[:-_TAIL_LINES]):
        if " error: " in line:
            errors.append(line)
        elif "CMake Error" in line:
            errors += lines[number : number + _LINES_OF_CMAKE]
    return "\n".join("    " + line[:240] for line in [*errors[:_ERROR_LINES], *lines[-_TAIL_LINES:]])
