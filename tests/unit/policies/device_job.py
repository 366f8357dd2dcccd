"""Ranks with the curves of devices, on clocks of their own: what LB-BSP makes of them, without a device."""

from __future__ import annotations

import numpy as np

from hvd_hetero.allocation import Gamma
from hvd_hetero.balancer import Balancer
from hvd_hetero.policies import LBBSP
from hvd_hetero.rounds import FinishedRound, MicroBatch, RoundPlan


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class DeviceJob:
    """One balancer and one policy object per rank, as in a real job; a sum instead of Horovod.

    ``noise`` is the spread of a time's logarithm; every ``outlier_every``-th micro-batch takes ten times as long.
    """

    def __init__(
        self,
        devices: list[Gamma],
        global_batch: int,
        *,
        noise=0.0,
        outlier_every=0,
        rounds_ahead=0,
        comm_s=0.01,
        seed=0,
        **options,
    ) -> None:
        self.devices = devices
        self.factor = [1.0] * len(devices)
        self.comm_s = comm_s
        self.clocks = [Clock() for _ in devices]
        self.policies = [LBBSP(device="gpu", **options) for _ in devices]
        self.balancers = [
            Balancer(policy, rank, len(devices), global_batch, clock=clock)
            for rank, (policy, clock) in enumerate(zip(self.policies, self.clocks, strict=True))
        ]
        self.finished: list[FinishedRound] = []
        self.balancers[0].observer = self.finished.append
        for balancer in self.balancers:
            balancer.set_rounds_ahead(rounds_ahead)
        self.failures: list[tuple[int, int, int]] = []
        """round, rank and size of every micro-batch that did not fit"""
        self._noise = noise
        self._outlier_every = outlier_every
        self._drawn = 0
        self._rng = np.random.default_rng(seed)

    @property
    def shares(self) -> tuple[int, ...]:
        return self.balancers[0].plan(self.balancers[0].planner.rounds_ahead).samples

    def rounds(self, count: int, short: int | None = None) -> None:
        for _ in range(count):
            self.round(short)
            assert len({balancer.plan(balancer.planner.rounds_ahead) for balancer in self.balancers}) == 1

    def round(self, short: int | None = None) -> None:
        vectors = []
        for rank, balancer in enumerate(self.balancers):
            plan = balancer.plan() if short is None else balancer.plan().resize(short)
            waiting = list(plan.sizes(rank)) or [0]
            while waiting:
                size = waiting.pop(0)
                if 0 < balancer.meter.limit < size:  # as the loader does, where the plan did not know yet
                    waiting = [balancer.meter.limit, size - balancer.meter.limit, *waiting]
                    continue
                balancer.begin(MicroBatch(plan, size, not waiting))
                if size > (self.devices[rank].out_of_memory or size):
                    self.failures.append((balancer.rounds, rank, size))
                    part = balancer.out_of_memory()
                    waiting = [*([part] * (size // part)), *([size % part] * (size % part > 0)), *waiting]
                    continue
                self.clocks[rank].now += self._seconds(rank, size)
                if waiting:
                    balancer.pause()
            vectors.append(balancer.report())
        end = max(clock.now for clock in self.clocks) + self.comm_s
        for clock in self.clocks:
            clock.now = end
        with np.errstate(invalid="ignore"):
            # As it travels: in float32.
            summed = np.sum(vectors, axis=0).astype(np.float32)
        for balancer in self.balancers:
            balancer.agree(summed)

    def _seconds(self, rank: int, size: int) -> float:
        if size == 0:
            return 0.0
        self._drawn += 1
        seconds = self.factor[rank] * self.devices[rank].seconds(size) * float(np.exp(self._noise * self._rng.normal()))
        return seconds * (10.0 if self._outlier_every and self._drawn % self._outlier_every == 0 else 1.0)

    def makespan_s(self, plan: RoundPlan | None = None) -> float:
        """By the true curves."""
        plan = self.balancers[0].plan(self.balancers[0].planner.rounds_ahead) if plan is None else plan
        return max(
            self.factor[rank] * sum(device.seconds(size) for size in plan.sizes(rank))
            for rank, device in enumerate(self.devices)
        )
