"""Where benchmark tables are stored, and under which circumstances they came about."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import PackageNotFoundError, version
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


def write_result(name: str, text: str, command: str | None = None) -> Path:
    """Store `text` as benchmarks/results/<name>.md, with machine, versions, date and command; return the path."""
    path = Path(__file__).resolve().parent / "results" / f"{name}.md"
    path.parent.mkdir(exist_ok=True)
    versions = filter(None, map(_version, ("numpy", "scipy", "torch", "tensorflow", "horovod")))
    path.write_text(
        f"# {name}\n\n{text.strip()}\n\n"
        f"{_cpu()}, {os.cpu_count()} cores; Python {platform.python_version()}, "
        f"{', '.join(versions)}; {date.today().isoformat()}. "
        f"`python benchmarks/{command or f'{name}.py'} --write`\n"
    )
    return path
