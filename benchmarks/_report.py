"""Store benchmark tables with the circumstances of their measurement."""

from __future__ import annotations

import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return None  # not part of this measurement


def error_of_median(values: Sequence[float], independent: int) -> float:
    """Return the median's standard error for n independent values: 0.93 of the quartiles' distance over sqrt(n)."""
    low, _, high = statistics.quantiles(values, n=4)
    return 0.93 * (high - low) / math.sqrt(independent)


def judged(medians: Sequence[tuple[float, float]], target: float, small: float) -> str:
    """Return whether medians, each with its error, are at most the target.

    Undecided is one whose error is above ``small`` and which is less than two errors from the target.
    """
    sure = [median <= target for median, error in medians if error <= small or abs(median - target) > 2 * error]
    if not all(sure):
        return "**missed**"
    return "met" if len(sure) == len(medians) else "**undecided**"


def _command() -> str:
    """Return the command from the project's root, with all options; for a script elsewhere, its name.

    The folder of traces is wherever somebody has them.
    """
    script, root = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[1]
    shown = script.relative_to(root) if script.is_relative_to(root) else Path(script.name)
    arguments = ["DIR" if name == "--traces" else each for name, each in pairwise(["", *sys.argv[1:]])]
    return shlex.join(["python", str(shown), *arguments])


def _commit() -> str:
    """Return the commit that is measured, with a + if other files than results have changed since."""
    root = Path(__file__).resolve().parents[1]
    changed = ["status", "--porcelain", "--", ".", ":!benchmarks/results"]
    try:
        shown, status = (
            subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (["rev-parse", "--short", "HEAD"], changed)
        )
    except (OSError, subprocess.CalledProcessError):
        return "an unknown commit"  # measured without git, or in a copy
    return f"commit {shown}{'+' if status else ''}"


def write_result(name: str, text: str) -> Path:
    """Store `text` as benchmarks/results/<name>.md, with its circumstances; return the path."""
    path = Path(__file__).resolve().parent / "results" / f"{name}.md"
    path.parent.mkdir(exist_ok=True)
    versions = filter(None, map(_version, ("numpy", "scipy", "torch", "tensorflow", "horovod")))
    path.write_text(
        f"# {name}\n\n{text.strip()}\n\n"
        f"{_cpu()}, {os.cpu_count()} cores; Python {platform.python_version()}, "
        f"{', '.join(versions)}; {_commit()}; {date.today().isoformat()}. "
        f"`{_command()}`\n"
    )
    return path
