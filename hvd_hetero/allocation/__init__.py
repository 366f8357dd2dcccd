"""How many samples each worker gets: shares by speed, and the split whose latest worker is as early as can be."""

from hvd_hetero.allocation.largest_remainder import proportional

__all__ = ["proportional"]
