"""The time a rank waits for others before it reports that, and before it ends the job."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields

VARIABLE = "HVD_HETERO_PATIENCE"
"""Environment variable that changes the limits: ``warn=10,deadlock=20,silent=60,busy=3600``, or ``off``."""

_GLOO, _GLOO_TIMEOUT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_TIMEOUT_SECONDS"


def horovod_timeout_s() -> float:
    """Return the seconds after which Horovod's collectives fail if a rank is silent; infinite with MPI."""
    if _GLOO not in os.environ:
        return math.inf
    try:
        return float(os.environ[_GLOO_TIMEOUT])
    except (KeyError, ValueError):
        return 30.0  # Horovod's own default


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a rank may wait at one stage of one round; ``inf`` means for ever.

    By default only a job that cannot go on ends. A rank at work, even in a debugger, may take any time.

    Parameters
    ----------
    warn
        Seconds until a rank reports which rank it waits for, and where that one is; then again whenever the wait has
        doubled.
    deadlock
        Seconds until the job ends if all ranks wait for one another.
    silent
        Seconds until the job ends if a rank does not answer (it was stopped, or its machine is gone), or if all ranks
        are in the same collective and it does not end.
    busy
        Seconds until the job ends if a rank is at work elsewhere: an evaluation, a checkpoint, a compiler.
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
        """Return limits that never warn and never end a job."""
        return cls(math.inf, math.inf, math.inf, math.inf)

    @classmethod
    def of_environment(cls) -> Patience:
        """Return the limits that ``HVD_HETERO_PATIENCE`` sets; the defaults for what it does not set."""
        text = os.environ.get(VARIABLE, "").strip()
        if text == "off":
            return cls.off()
        try:
            settings = (part.split("=") for part in filter(None, text.split(",")))
            return cls(**{name.strip(): float(seconds) for name, seconds in settings})
        except (TypeError, ValueError) as error:
            names = ", ".join(field.name for field in fields(cls))
            raise ValueError(
                f"{VARIABLE} must name positive seconds of {names}, or be off; got {text!r}; write warn=10,busy=60"
            ) from error
