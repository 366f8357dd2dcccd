"""How long a rank waits for others before it says so, and before it ends the job."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields

__all__ = ["VARIABLE", "Patience"]

VARIABLE = "HVD_HETERO_PATIENCE"
"""the environment variable that changes it, such as ``warn=10,deadlock=20,silent=60,busy=3600``, or ``off``"""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a rank waits in one place of one round. ``inf``: for ever.

    Only what cannot go on ends a job by itself. A rank that is at work, if only in a debugger, may need any time.

    Parameters
    ----------
    warn
        until it says for which rank it waits, and where that one is; then again each time it has waited twice as long
    deadlock
        until the job ends where all ranks wait, for one another
    silent
        until the job ends where a rank does not answer, as it was stopped, or its machine is gone; and where all ranks
        are in the same collective, which does not end
    busy
        until the job ends where a rank is at work elsewhere: an evaluation, a checkpoint, a compiler
    """

    warn: float = 30.0
    deadlock: float = 60.0
    silent: float = 300.0
    busy: float = math.inf

    def __post_init__(self) -> None:
        for field in fields(self):
            seconds = getattr(self, field.name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
                raise ValueError(f"{field.name} must be a positive number of seconds, got {seconds!r}; inf is for ever")

    @classmethod
    def off(cls) -> Patience:
        """Wait for ever, and say nothing."""
        return cls(math.inf, math.inf, math.inf, math.inf)

    @classmethod
    def of_environment(cls) -> Patience:
        """What ``HVD_HETERO_PATIENCE`` says; where it says nothing, the defaults."""
        text = os.environ.get(VARIABLE, "").strip()
        if text == "off":
            return cls.off()
        settings: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, seconds = part.partition("=")
            try:
                settings[name.strip()] = float(seconds)
            except ValueError:
                settings[name.strip()] = math.nan
        names = [field.name for field in fields(cls)]
        if any(name not in names or math.isnan(seconds) for name, seconds in settings.items()):
            raise ValueError(
                f"{VARIABLE} must name seconds of {', '.join(names)}, or be off; got {text!r}; write warn=10,busy=60"
            )
        return cls(**settings)
