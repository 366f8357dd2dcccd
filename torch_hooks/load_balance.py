"""What the loader and the optimizer of one training share: the policy and the state of the rounds."""

from __future__ import annotations

import atexit
import itertools
import time
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING

import horovod.torch as hvd

from hvd_hetero.balancer import Balancer, MicroBatch
from hvd_hetero.policies import Policy, resolve_policy
from hvd_hetero.resources import ResourceMeter
from hvd_hetero.telemetry import TelemetryWriter

if TYPE_CHECKING:
    from torch_hooks.optimizer import DistributedOptimizer

__all__ = ["LoadBalance"]

# Every LoadBalance has its own names on the wire, so that two trainings of one job can be under way at once. Ranks
# make them in the same order, as they do everything else that Horovod names.
_numbers = itertools.count()


class LoadBalance:
    """How the global batch is divided among the ranks. Make one per training, after ``hvd.init()``, alike on all ranks.

    Parameters
    ----------
    policy
        A name (``"bsp"``, ``"lb-bsp"``) or a policy object (``StaticAllocation([3, 7])``).
    global_batch
        Samples per round over all ranks together: what one process would call its batch size.
    telemetry
        Where rank 0 writes one JSON line per round (``docs/telemetry.md``). None: nowhere.
    """

    def __init__(
        self, policy: str | Policy = "lb-bsp", *, global_batch: int, telemetry: str | Path | None = None
    ) -> None:
        if not hvd.is_initialized():
            raise ValueError("Horovod is not initialised; call hvd.init() before LoadBalance(…)")
        self.policy = resolve_policy(policy)
        self._telemetry: TelemetryWriter | None = None
        self.balancer = Balancer(
            self.policy,
            hvd.rank(),
            hvd.size(),
            global_batch,
            clock=time.perf_counter,
            meter=ResourceMeter(clock=time.perf_counter),
        )
        if telemetry is not None and hvd.rank() == 0:
            self._telemetry = TelemetryWriter(
                telemetry, policy=self.policy.name, workers=hvd.size(), global_batch=self.balancer.global_batch
            )
            self.balancer.observer = self._telemetry
            atexit.register(self._telemetry.close)
        self.prefix = f"hetero{next(_numbers)}"  # drawn last: what fails above may fail on one rank alone
        self.optimizer: DistributedOptimizer | None = None

    @property
    def rounds(self) -> int:
        """Rounds that all ranks have finished. The same number on every rank: the place to stop a loop early."""
        return self.balancer.rounds

    @property
    def plan(self) -> tuple[int, ...]:
        """Samples of every rank in the round at hand (between rounds: in the next one)."""
        return self.balancer.plan().samples

    @property
    def batch_size(self) -> int:
        """Samples of this rank in the round at hand (between rounds: in the next one)."""
        return self.plan[self.balancer.rank]

    @property
    def round_complete(self) -> bool:
        """Whether ``step()`` really steps now, or has just done so; False while micro-batches are still gathered."""
        return not self.balancer.between_updates

    def batch(self, samples: int) -> None:
        """Announce a batch of the user's own making, before its forward pass: one micro-batch, one round.

        For data that does not come from a ``BalancedLoader``. The gradient is weighted by the samples given here,
        whatever was planned (``batch_size`` tells the plan); 0 is allowed, and then a loss of zero must still be
        propagated, so that this rank takes part in the synchronisation.
        """
        if isinstance(samples, bool) or not isinstance(samples, Integral):
            raise TypeError(f"samples must be a whole number, got {samples!r}")
        if samples < 0:
            raise ValueError(f"samples must not be negative, got {samples}")
        self.begin(MicroBatch(self.balancer.plan(), int(samples)))

    def begin(self, work: MicroBatch, input_s: float = 0.0) -> None:
        """A micro-batch begins (the loader's way of saying so)."""
        if self.optimizer is None:
            raise ValueError(
                "no optimizer synchronises this LoadBalance, so the ranks would drift apart in silence; wrap yours: "
                "optimizer = DistributedOptimizer(optimizer, balance, named_parameters=model.named_parameters())"
            )
        self.balancer.begin(work, input_s)
        self.optimizer.begin_micro_batch()

    def idle_round(self) -> None:
        """Take part in a round without data (the loader's doing, where the loop's body does not run)."""
        assert self.optimizer is not None, "begin() has checked it"
        self.optimizer.idle_round()

    def close(self) -> None:
        """Finish the telemetry. Done by itself when the process ends."""
        if self._telemetry is not None:
            self._telemetry.close()
