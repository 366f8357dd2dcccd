"""What goes wrong when Horovod is built."""

from hvd_hetero.errors import HeteroError

__all__ = ["HorovodBuildError"]


class HorovodBuildError(HeteroError):
    """Horovod cannot be built here; the message names what is missing, or where the log of the failed build is."""
