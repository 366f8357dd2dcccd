"""What a training is made of, whatever the framework: the policy, the rounds, and where the record of them goes."""

from __future__ import annotations

import atexit
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hvd_hetero.balancer import Balancer
from hvd_hetero.policies import Policy, resolve_policy
from hvd_hetero.resources import ResourceMeter
from hvd_hetero.signals import SignalChannel
from hvd_hetero.synchronisation import Mixing, resolve_mixing
from hvd_hetero.telemetry import TelemetryWriter

__all__ = ["Training", "Wire"]

# Every training has its own names on the wire, so that two of them in one job can be under way at once. Ranks make them
# in the same order, as they do everything else that Horovod names. Their counters may differ all the same: a rank that
# has come later has made fewer. So rank 0's counts.
_numbers = itertools.count()


class Wire(Protocol):
    """What of Horovod the core needs while a training is set up; each adapter gives its own."""

    def broadcast_object(self, obj: Any, root_rank: int, name: str) -> Any:
        """Rank ``root_rank``'s object, on every rank."""

    def allgather_object(self, obj: Any, name: str) -> Sequence[Any]:
        """Every rank's object, in order of rank."""


class Training:
    """One rank's part of one training: its balancer, its telemetry, its signals, and a prefix for names on the wire."""

    def __init__(
        self,
        policy: str | Policy,
        rank: int,
        workers: int,
        global_batch: int,
        telemetry: str | Path | None = None,
        *,
        sync: str | Mixing = "allreduce",
        wire: Wire | None = None,
    ) -> None:
        self.policy = resolve_policy(policy)
        self._telemetry: TelemetryWriter | None = None
        self.balancer = Balancer(
            self.policy,
            rank,
            workers,
            global_batch,
            clock=time.perf_counter,
            meter=ResourceMeter(clock=time.perf_counter),
        )
        mixing = resolve_mixing(sync, workers, updates_locally=self.policy.updates_locally)
        if telemetry is not None and rank == 0:
            self._telemetry = TelemetryWriter(
                telemetry, policy=self.policy.name, workers=workers, global_batch=self.balancer.global_batch
            )
            self.balancer.observer = self._telemetry
            atexit.register(self._telemetry.close)
        number = next(_numbers)  # drawn last: what fails above may fail on one rank alone
        if wire is not None:
            number = wire.broadcast_object(number, root_rank=0, name="hetero.number")
        self.prefix = f"hetero{number}"
        self.mixing = mixing
        if mixing is not None and wire is not None:
            # Rank 0's, for all: its probabilities are floating-point results of an optimisation.
            self.mixing = wire.broadcast_object(mixing, root_rank=0, name=f"{self.prefix}.mixing")
        self._channel: SignalChannel | None = None
        if self.balancer.plan().ends == "first" and wire is not None:
            name = f"{self.prefix}.signals"
            self._channel = SignalChannel(
                rank, workers, lambda payload: wire.allgather_object(payload, name=name), generation=number
            )
            self.balancer.signals = self._channel

    def close(self) -> None:
        """Finish the telemetry and the signals. Done by itself when the process ends."""
        if self._channel is not None:
            self._channel.close()
        if self._telemetry is not None:
            self._telemetry.close()
            atexit.unregister(self._telemetry.close)
