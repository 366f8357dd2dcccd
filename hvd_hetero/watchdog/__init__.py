"""Ranks that wait for one another say so: for whom, and where; and a job that cannot go on ends."""

from hvd_hetero.watchdog.patience import Patience
from hvd_hetero.watchdog.watchdog import EXIT_CODE, Watchdog

__all__ = ["EXIT_CODE", "Patience", "Watchdog"]
