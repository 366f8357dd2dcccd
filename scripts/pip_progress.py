"""Run pip with its output in a log and one line of progress in its place."""

import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

_STEP = re.compile(r"^\s*(Collecting|Downloading|Installing collected|Building|Preparing|Processing)\b\s*(\S*)")
_PLAIN_EVERY_S = 5.0
_TAIL_LINES = 15


def run_pip(python: Path, arguments: list[str], log: Path, environ: Mapping[str, str]) -> int:
    """Run pip and return its exit code; if it fails, show the log's last lines and its place."""
    live, start_s = sys.stderr.isatty(), time.monotonic()
    shown_s = start_s
    argv = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    with log.open("w") as file:
        pip = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
        )
        assert pip.stdout is not None
        for line in pip.stdout:
            file.write(line)
            now_s = time.monotonic()
            step = _STEP.match(line)
            if step is None or (not live and now_s - shown_s < _PLAIN_EVERY_S):
                continue
            shown_s = now_s
            what = "Unpacking packages" if step[1].startswith("Installing") else f"{step[1]} {Path(step[2]).name}"
            text = f"      {now_s - start_s:4.0f} s  {what[:60]}"
            sys.stderr.write(f"\r\033[K{text}" if live else f"{text}\n")
            sys.stderr.flush()
        code = pip.wait()
    if live:
        sys.stderr.write("\r\033[K")
    if code != 0:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        sys.stderr.write("".join(f"    {line}\n" for line in lines[-_TAIL_LINES:]) + f"    the whole log: {log}\n")
    return code
