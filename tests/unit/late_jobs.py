"""Ranks beside a reducer of the user's, in simulated time: late tables, with a sum in the place of a wire."""

from __future__ import annotations

from hvd_hetero.balancer import Balancer
from hvd_hetero.late_tables import LateTables
from hvd_hetero.rounds import MicroBatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Job:
    """Ranks that do as many samples per second; a table is read when the next round is over."""

    def __init__(self, policy, speeds, global_batch, *, parts=1, fixed_s=0.0):
        self.parts, self.fixed_s = parts, fixed_s
        self.clocks = [Clock() for _ in speeds]
        self.speeds = speeds
        self.balancers = [
            Balancer(policy(), rank, len(speeds), global_batch, clock=clock) for rank, clock in enumerate(self.clocks)
        ]
        self.tables = [LateTables(balancer) for balancer in self.balancers]
        self.finished = []
        self.balancers[0].observer = self.finished.append
        self._summed = None

    def round(self, data=(), total=0, **row):
        for rank, (balancer, clock) in enumerate(zip(self.balancers, self.clocks, strict=True)):
            plan = balancer.plan()
            plan = plan.resize(total or plan.total).with_equal_counts(self.parts)
            for number, samples in enumerate(plan.sizes(rank)):
                if number:
                    balancer.pause()
                balancer.begin(MicroBatch(plan, samples, data=data[rank] if data else 0))
                clock.now += self.fixed_s + samples / self.speeds[rank]
                balancer.meter.done(samples)
        end = max(clock.now for clock in self.clocks) + 0.01
        for balancer, clock, tables in zip(self.balancers, self.clocks, self.tables, strict=True):
            balancer.meter.batch.done_at = clock.now
            balancer.meter.add_wait(end - clock.now)
            tables.close_round()
            clock.now = end
        if self._summed is not None:
            for tables in self.tables:
                tables.receive_table(self._summed)
            self._summed = None
        if self.tables[0].due:
            figures = {"settings": 0.0, "parameter_norm": 0.0, "bits": 0.0, "broken": 0.0} | row
            self._summed = sum(tables.row(**figures) for tables in self.tables)
