"""Report which rank a waiting rank waits for, and where that one is; end a job that cannot go on."""

from hvd_hetero.watchdog.patience import Patience
from hvd_hetero.watchdog.watchdog import EXIT_CODE, Watchdog

__all__ = ["EXIT_CODE", "Patience", "Watchdog"]
