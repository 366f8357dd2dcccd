r"""The communication model: α + M/β, put together as each policy does.

A message of M bytes over a link of β bytes per second and latency α takes α + M/β. Every worker i has its own link,
β_i(t) = (its bandwidth) x (its share at t). Hence

    ring         allreduce after the last worker is ready:  2(n-1) (α + M / (n min β))        (n > 1)
    neighbours   one exchange after the other for c matchings, and the table of reports, which has no gradients to
                 travel with, by a separate allreduce, whose few bytes are not counted:
                 c (α + M / min β) + 2(n-1) α
    server       worker i pulls before its batch and pushes after it, α + M/β_i each; pushes go through the server's own
                 link first come, first served, M/β_0 each:  f_j = max(f_{j-1}, a_j) + M/β_0  for the j-th arrival a_j
    recorded     after the last worker is ready, so long as a recorded run took in that round, whatever the policy

Left out: overlap of communication with the backward pass (so M counts what is not overlapped), congestion between
links, bandwidth that changes during a round (a push goes at the bandwidth of its pull), packet loss.

Shapes: n workers.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.tools.simulation.settings import LONGEST_S, Setting, check

Floats = NDArray[np.float64]
Kind = Literal["ring", "server", "recorded"]

KINDS = Setting(str, "ring", known=("ring", "server", "recorded"))
_BYTES_PER_S = Setting(float, math.inf, sys.float_info.min, of="bytes per second")
_SETTINGS = {
    "kind": KINDS,
    "latency_s": Setting(float, 0.0, 0, LONGEST_S, "seconds"),
    "message_bytes": Setting(float, 0.0, 0, 1e15, "the bytes of gradients"),
    "bandwidth": _BYTES_PER_S,
    "server_bandwidth": _BYTES_PER_S,
}


@dataclass(frozen=True, slots=True)
class Network:
    """How long messages take. The default is a network that takes no time."""

    kind: Kind = "ring"
    latency_s: float = 0.0
    message_bytes: float = 0.0
    """M, the gradients (or parameters) of one worker."""
    bandwidth: float = math.inf
    """β of a worker's link, bytes per second, unless the worker has its own."""
    server_bandwidth: float = math.inf
    """β_0 of the server's link, bytes per second."""
    recorded_s: tuple[float, ...] = ()
    """Seconds per round of the kind "recorded", over and over."""

    def __post_init__(self) -> None:
        check(self, _SETTINGS)
        if (self.kind == "recorded") != bool(self.recorded_s):
            raise ValueError(f"recorded_s goes with kind='recorded' and no other, got kind={self.kind!r}")

    def message_s(self, bandwidth: Floats | np.float64) -> Floats:
        """Return the seconds of one message over each worker's link."""
        return np.asarray(self.latency_s + self.message_bytes / bandwidth)

    def allreduce_s(self, bandwidth: Floats, round_number: int) -> float:
        """Return the seconds from the last rank's being ready until all have the sum; 0 with a server."""
        n = len(bandwidth)
        if self.kind == "recorded":
            return self.recorded_s[round_number % len(self.recorded_s)]
        if self.kind == "server" or n == 1:
            return 0.0
        return float(2 * (n - 1) * (self.latency_s + self.message_bytes / (n * bandwidth.min())))

    def exchange_s(self, bandwidth: Floats, matchings: int, round_number: int) -> float:
        """Return the seconds of exchanges with one neighbour after the other, instead of the allreduce."""
        if self.kind == "recorded":
            return self.recorded_s[round_number % len(self.recorded_s)]
        table_s = 2 * (len(bandwidth) - 1) * self.latency_s
        return float(matchings * (self.latency_s + self.message_bytes / bandwidth.min()) + table_s)

    def served(self, arrival_s: Floats) -> Floats:
        """Return when each push is through the server's link: first come, first served, ties to the lower rank."""
        service_s = self.message_bytes / self.server_bandwidth
        if service_s == 0:
            return arrival_s
        order = np.argsort(arrival_s, kind="stable")
        position = np.arange(len(order))
        # f_j = max over i <= j of a_i + (j - i + 1) s: the busy period that j belongs to began with some i.
        done = np.maximum.accumulate(arrival_s[order] - position * service_s) + (position + 1) * service_s
        result = np.empty_like(done)
        result[order] = done
        return np.asarray(result)
