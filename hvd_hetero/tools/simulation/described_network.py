"""The ``[network]`` of a description (``docs/simulation.md``)."""

from __future__ import annotations

import math
from pathlib import Path

from hvd_hetero.tools.simulation import limits
from hvd_hetero.tools.simulation.described_workers import BANDWIDTH, BYTES_PER_MBIT, MILLISECONDS
from hvd_hetero.tools.simulation.network import Network
from hvd_hetero.tools.simulation.series import Series
from hvd_hetero.tools.simulation.settings import Range, Settings

__all__ = ["read_network"]

_SECONDS = Range(0, limits.LONGEST_S, "the seconds that the transfer of a round takes")


def read_network(settings: Settings, folder: Path | None = None) -> Network:
    """Return the network that a table describes; its file's path is relative to the folder."""
    kind = settings.choice("kind", ("ring", "server", "recorded"), "ring")
    if kind == "recorded":
        series = Series(folder or Path())
        network = Network("recorded", recorded_s=tuple(series.column(settings, _SECONDS)))
    else:
        network = Network(
            "server" if kind == "server" else "ring",
            latency_s=settings.number("latency_ms", MILLISECONDS, 0.0) / 1e3,
            message_bytes=settings.number("message_mb", Range(0, 1e9, "megabytes of gradients"), 0.0) * 1e6,
            bandwidth=settings.number("bandwidth_mbps", BANDWIDTH, math.inf) * BYTES_PER_MBIT,
            server_bandwidth=settings.number("server_bandwidth_mbps", BANDWIDTH, math.inf) * BYTES_PER_MBIT,
        )
    settings.finish()
    return network
