"""A record as named numbers, for trackers of experiments."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence

from hvd_hetero.telemetry.records import Record

_PER_RANK = {"batch": "samples", "compute_s": "compute_s", "input_s": "input_s", "wait_s": "wait_s"}


def figures(record: Record) -> dict[str, float]:
    """Return the figures of a round by name: ``samples_per_s``, ``waiting_share``, and the ranks' figures.

    The ranks' are ``batch/rank_0`` and so on, and so for ``compute_s``, ``input_s`` and ``wait_s``; with more than 16
    ranks ``batch/least``, ``batch/median`` and ``batch/most``. Unknown figures are left out.
    """
    elapsed_s, found = record["elapsed_s"], {}
    waits = [wait for wait in record["wait_s"] if wait is not None]
    if elapsed_s > 0:
        found["samples_per_s"] = sum(record["samples"]) / elapsed_s
        if waits:
            found["waiting_share"] = statistics.fmean(waits) / elapsed_s
    if "noise_scale" in record:
        found["noise_scale"] = record["noise_scale"]
    for name, key in _PER_RANK.items():
        found |= {f"{name}/{rank}": value for rank, value in _ranks(record[key]).items()}
    return found


def _ranks(values: Sequence[float | None]) -> dict[str, float]:
    known = {rank: float(value) for rank, value in enumerate(values) if value is not None}
    # More curves than 16 cannot be told apart in a plot (arbitrary).
    if len(values) <= 16 or not known:
        return {f"rank_{rank}": value for rank, value in known.items()}
    return {"least": min(known.values()), "median": statistics.median(known.values()), "most": max(known.values())}


def require(module: str, who: str, package: str) -> None:
    """Raise if the library of a listener is not installed: when it is made, and not in the first round."""
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"{who} needs {module}, which is not installed: pip install {package}", name=module)
