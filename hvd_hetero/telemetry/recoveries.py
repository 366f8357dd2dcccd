"""How long a change of ranks took, step by step, as the first round after it records it. Schema: ``docs/telemetry.md``.

    failure     leave ─▶ rendezvous ─▶ broadcast ─▶ set-up ─▶ first round
    newcomer    start ───────────────▶ broadcast ─▶ set-up ─▶ first round

A rank's steps follow each other without a gap, so they sum to its total. A survivor's total begins when it notices the
change. It does not know when another rank was lost: after its last round at the earliest, and ``noticed_s`` is the
time from then on. A newcomer's total begins with its process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_hetero.telemetry.strict import number, refuse

__all__ = ["STEPS", "Recovery", "read_recovery"]

Floats = npt.NDArray[np.float64]

STEPS = ("start", "leave", "rendezvous", "broadcast", "set_up", "first_round")
"""The steps of a recovery, in order. No rank does all of them."""

_KEYS = ("noticed_at", "noticed_s", *(f"{step}_s" for step in STEPS), "total_s")


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds of each step of one change of ranks. Arrays have an entry per rank; NaN: not known, or no such step."""

    round: int
    """The first round after it."""
    noticed_at: Floats
    """When a survivor noticed, in seconds since 1970."""
    noticed_s: Floats
    """Seconds from the end of a survivor's last round until it noticed."""
    start_s: Floats
    """Newcomers: from the beginning of the process until it meets the others."""
    leave_s: Floats
    """After a failure: closing connections, and going back to the commit."""
    rendezvous_s: Floats
    """Meeting again, with the start of ranks that join."""
    broadcast_s: Floats
    """Taking over what rank 0 has committed."""
    set_up_s: Floats
    """The user's own function, until all ranks have agreed on the next plan."""
    first_round_s: Floats
    """The first round, as rank 0 saw it: all ranks begin and end it together."""
    total_s: Floats
    """From noticing, or from the beginning of the process, until the end of the first round."""

    @property
    def joined(self) -> npt.NDArray[np.bool_]:
        """Which ranks are new."""
        return np.isfinite(self.start_s)

    @property
    def steps(self) -> dict[str, Floats]:
        """The seconds of each step, by its name."""
        return {step: getattr(self, f"{step}_s") for step in STEPS}


def read_recovery(written: Any, round: int, workers: int, source: str) -> Recovery:
    """Return the recovery that a line holds; ``source`` names the line in errors."""
    if not isinstance(written, Mapping):
        refuse(source, "an object", written)
    columns = {key: _column(written.get(key), workers, f"{source}.{key}") for key in _KEYS}
    return Recovery(round=round, **columns)


def _column(values: Any, workers: int, source: str) -> Floats:
    if not isinstance(values, list) or len(values) != workers:
        refuse(source, f"a list of {workers} numbers, or null for an unknown one, one for each rank", values)
    seconds = np.array([number(value, np.float64, source, null=True) for value in values])
    if (seconds < 0.0).any():
        refuse(source, "numbers, 0 or more, or null for an unknown one", values)
    return seconds
