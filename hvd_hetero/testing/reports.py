"""What a rank tells the process that launched it, beyond what it prints."""

from __future__ import annotations

import json
import os
from typing import Any

from hvd_hetero.testing.rank import RUN_DIR, run_file


def report(value: Any) -> None:
    """Hand ``value`` to the launcher, as JSON: it is ``LaunchResult.reports[rank]`` there. The last call counts.

    Arrays and scalars of numpy and tensors arrive as lists and numbers; large ones are better saved to a file.
    """
    if RUN_DIR not in os.environ:
        raise RuntimeError(
            f"report() is for ranks that hvd_hetero.testing.launch started, and {RUN_DIR} is not set here; "
            "launch this script with it, or guard the call"
        )
    text = json.dumps(value, default=_plain)
    path = run_file("report")
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)  # a rank killed in the middle leaves its last whole report


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"report() takes what JSON can hold, and arrays; got {type(value).__name__}: {value!r:.200}")
