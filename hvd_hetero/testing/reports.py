"""Reports of a rank to the process that launched it, beyond its printed output."""

from __future__ import annotations

import json
import os
from typing import Any

from hvd_hetero.testing.rank import RUN_DIR, run_file


def report(value: Any) -> None:
    """Send ``value`` as JSON to the launcher, where it is ``LaunchResult.reports[rank]``. The last call counts.

    NumPy arrays and scalars, and tensors, arrive as lists and numbers. Save large ones to a file instead.
    """
    if RUN_DIR not in os.environ:
        raise RuntimeError(
            f"report() is for ranks that hvd_hetero.testing.launch started, and {RUN_DIR} is not set here; "
            "launch this script with it, or guard the call"
        )
    text = as_json(value)
    path = run_file("report")
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    # A rank killed meanwhile keeps its last whole report.
    os.replace(path + ".new", path)


def as_json(value: Any) -> str:
    """Return ``value`` as one line of JSON."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"report() takes what JSON can hold, and arrays; got {type(value).__name__}: {value!r:.200}")
