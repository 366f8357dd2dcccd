"""Somebody has finished: the channel by which the first rank of a non-blocking round stops the others."""

from hvd_hetero.communication.signals.channel import SignalChannel
from hvd_hetero.communication.signals.limits import Limits

__all__ = ["Limits", "SignalChannel"]
