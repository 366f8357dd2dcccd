"""The next barrier of ElasticBSP: the one at which the fastest worker waits least."""

from hvd_hetero.barriers.grid_scan import full_grid_scan, grid_scan
from hvd_hetero.barriers.zipline import Barrier, zipline

__all__ = ["Barrier", "full_grid_scan", "grid_scan", "zipline"]
