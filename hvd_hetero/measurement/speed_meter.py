"""One rank's measurements of itself: how long it computes and waits for data, and what speed it expects next.

A speed is samples over the seconds that the rank was at work: forward, backward and update, and waiting for its own
data. All of that moves with the samples. For policies that weigh it, the part that does not is separated
(``fixed_cost``); then the speed refers to a micro-batch of the typical size. Waiting for the other ranks is in neither:
not at the end of a round, and not inside a micro-batch, where a layer exchanges with them. Otherwise a fast rank would
seem as slow as the one it waits for.

On a processor whose work runs behind the clock (an accelerator with a queue), a ``Stopwatch`` takes the times. It knows
a round's times only when the queue has come past it. So there, this rank reports and learns from the round before: it
asks when all of this round is queued. A host that is ahead then waits for the device, which has work meanwhile.
Waiting for data costs such a host nothing while the device is at work, so it counts only as long as the device paused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hvd_hetero.kept import Kept
from hvd_hetero.measurement.batch_timer import BatchTimer
from hvd_hetero.measurement.fixed_cost import Pace
from hvd_hetero.measurement.hindrances import HindranceMeter, Surroundings
from hvd_hetero.measurement.memory import MemoryMeter
from hvd_hetero.measurement.readings import ResourceMeter
from hvd_hetero.measurement.speed_learner import OwnRound, SpeedLearner
from hvd_hetero.measurement.stopwatch import Stopwatch
from hvd_hetero.prediction.base import Predictor
from hvd_hetero.rounds import MicroBatch, SampleFigures

if TYPE_CHECKING:
    from hvd_hetero.measurement.device_profile import DeviceProfile

# The first round of a process pays for buffers, kernels and caches that no later one does; its speed predicts nothing.
_WARM_UP_ROUNDS = 1


class SpeedMeter(Kept):
    """The measurements and predictions of one rank."""

    PARTS = ("learner", "memory")

    def __init__(
        self,
        predictor: Predictor,
        clock: Callable[[], float],
        readings: ResourceMeter | None,
        typical_size: float,
        hindrances: HindranceMeter | None = None,
        *,
        profile: DeviceProfile | None = None,
        weighs_fixed_cost: bool = False,
    ) -> None:
        self.batch = BatchTimer(clock)
        pace = Pace(typical_size) if weighs_fixed_cost else None
        self.learner = SpeedLearner(predictor, pace, profile, Surroundings(readings, hindrances, clock()))
        self.stopwatch: Stopwatch | None = None
        self.defers_work = True
        """Whether the adapter calls `do_deferred_work` while other ranks still compute, so that it delays no one."""
        self.queued = False
        """Whether work is queued on a device, so that it goes on after the clock was read."""
        self.memory = MemoryMeter()
        self.round = OwnRound()
        """The current round."""
        self._before = OwnRound(compute_s=math.nan, input_s=math.nan)
        """The round before it, whose times a stopwatch gives."""
        self._unlearned: OwnRound | None = None
        """A round that is still to be learned from."""
        self._apply_s = 0.0
        self._closed: OwnRound | None = None
        """Finished rounds that are in no row yet."""
        self._rounds = 0
        self.reads = False
        """Whether a stopwatch is being read, which waits for the end of a round that other ranks take part in."""
        self._waited_s = math.nan
        """Seconds that this rank waited for others, and for the transfer, in the round before."""
        self._lap_s = 0.0
        """Seconds of the round before, by a stopwatch."""

    @property
    def limit(self) -> int:
        """The largest micro-batch that is known to fit in memory; 0: any."""
        return self.memory.learned

    @property
    def busy_s(self) -> float:
        """The time of the current round so far, during a micro-batch, as the table will count it."""
        return self._apply_s + self.round.busy_s + self.batch.own_s

    def begin(self, input_s: float) -> None:
        """Start computing a micro-batch that has arrived after ``input_s`` seconds."""
        self.round.input_s += input_s
        if self.stopwatch is not None:
            self.stopwatch.start()
        self.batch.begin()
        if not self.round.micro_batches:
            self.round.once_s = self._apply_s + self.round.input_s

    def forward_done(self, samples: int) -> None:
        """Note that the loss of the micro-batch is there, and only its backward pass follows."""
        self.batch.forward_done()
        if self.stopwatch is not None:
            self.stopwatch.forward_done(samples)

    def done(self, samples: int, weight: float | None = None, figures: SampleFigures | None = None) -> None:
        """Note that the micro-batch is computed; a second call changes nothing."""
        if not self.batch.running:
            return
        self.end_wait()
        self.memory.done(warm=self._rounds >= _WARM_UP_ROUNDS)
        self.round.compute_s += self.batch.done(samples)
        self.round.held_s += self.batch.held_s
        self.round.add(samples, samples if weight is None else weight, figures)
        if self.stopwatch is not None:
            self.stopwatch.stop()

    @contextmanager
    def waiting_for_others(self) -> Iterator[None]:
        """Leave the time inside of this context out of the micro-batch's own: a layer waits for other ranks in it."""
        self.begin_wait()
        try:
            yield
        finally:
            self.end_wait()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave the time inside of this context out: it is neither work nor waiting, as of an evaluation."""
        batch = self.batch
        stopwatch, running, began_at = self.stopwatch if batch.running else None, batch.running, batch.clock()
        batch.running = False
        if stopwatch is not None:
            stopwatch.stop()
        yield
        batch.running = running
        batch._began_at += batch.clock() - began_at
        self.memory.begin(0.0)  # which measures nothing: something else has used memory meanwhile
        if stopwatch is not None:
            stopwatch.start()

    def begin_wait(self) -> None:
        """Begin to wait for others; until `end_wait`, nothing counts as the rank's work."""
        if self.batch.begin_wait() and self.stopwatch is not None:
            self.stopwatch.stop()

    def end_wait(self) -> None:
        """End the wait, if there was one."""
        if self.batch.end_wait() and self.stopwatch is not None:
            self.stopwatch.start(waited=True)

    def add_wait(self, seconds: float) -> None:
        """Add the seconds that the rank waited for others after its work on a micro-batch."""
        self.round.held_s += seconds

    def failed(self, size: int, *, memory_in_use: bool = False) -> int:
        """Note that a micro-batch did not fit, and return how large its parts may be. Its time teaches no speed.

        ``memory_in_use``: something else may still have held memory, so the failure says nothing about the size.
        """
        if not memory_in_use:
            self.memory.fail(size)
        self.batch.running = False
        if self.stopwatch is not None:
            self.stopwatch.stop()
        self.round.disturbed = True
        return min(self.limit or size, -(-size // 2))

    def catch_up(self) -> None:
        """Wait for what is queued, if a stopwatch follows it."""
        if self.stopwatch is not None:
            self.stopwatch.catch_up()

    def close(self, planned: int) -> None:
        """End a round whose figures leave later, with those of others. ``planned``: micro-batches for the policy."""
        self.round.compute_s += self._apply_s
        self.round.once_s += self._apply_s
        self._apply_s, self.round.planned = 0.0, planned
        self._closed = self.round if self._closed is None else self._closed + self.round
        self.round = OwnRound()
        if self.stopwatch is not None:
            self.stopwatch.keep()

    def learn(self, *, short: bool) -> None:
        """Learn, after the last micro-batch of a round, from what is known now, but not from a short round."""
        if self._closed is not None:
            self.round, self._closed = self._closed, None
        self.round.compute_s += self._apply_s
        self._apply_s = 0.0
        self.round.teaches = self._rounds >= _WARM_UP_ROUNDS and not self.round.disturbed and not short
        self._rounds += 1
        if self.stopwatch is not None:
            self.reads = True
            lap = self.stopwatch.read()
            self.reads = False
            self._before.compute_s = lap.work_s
            self._waited_s, self._lap_s = (s / self._before.rounds for s in (lap.waiting_s, lap.elapsed_s))
            if lap.paused_s < self._before.input_s:
                self._before.input_s = lap.paused_s
        known = self.round if self.stopwatch is None else self._before
        uses_drivers = self.learner.predictor.uses_drivers
        if known.samples and 0.0 < known.busy_s < math.inf and known.teaches:
            # Learning takes up to a third of a millisecond, for which all would wait. So after less than ten
            # milliseconds of work it is deferred. The report is then a round old, which costs a round at the old split
            # after each change.
            if self.defers_work and known.busy_s < 0.01 and not uses_drivers:
                self._unlearned = known
            else:
                self.learner.learn(known)
        # A speed goes with the drivers read before its round, a prediction with the present ones (lb-bsp, Eq. 4).
        # Reading them takes most of a millisecond, for which all ranks would wait: a rank that does not use them reads
        # them later.
        if uses_drivers:
            self.learner.surroundings.read_drivers()

    def _learn_the_rest(self) -> None:
        if (known := self._unlearned) is not None:
            self._unlearned = None
            self.learner.learn(known)
            self.learner.expected()  # what a predictor computes for a forecast is ready before the row has to leave

    def fitting_samples(self, work: MicroBatch) -> int:
        """Return how many of a micro-batch's samples fit in memory, if they are too many; else 0."""
        whole = self.learner.work_of(work)
        return max(int(self.limit / whole * work.samples), 1) if 0 < self.limit < whole else 0

    def row(self) -> dict[str, float]:
        """Return this rank's figures for the table, after `learn`: means, if they are of several rounds."""
        known = self.round if self.stopwatch is None else self._before
        return {
            "samples": self.round.samples / self.round.rounds,
            "micro_batches": (self.round.planned or self.round.micro_batches) / self.round.rounds,
            "compute_s": known.compute_s / known.rounds,
            "input_s": known.input_s / known.rounds,
            "wait_s": self._waited_s,
            "lap_s": 0.0 if self.stopwatch is None else self._lap_s,
            **self.memory.row(),
            "timed_samples": self.learner.work_of(known) / known.rounds if known.teaches else 0,
            "once_s": self.round.once_s / known.rounds if self.stopwatch is None and self.round.micro_batches else 0.0,
            "weight": self.round.weight / self.round.rounds,
            **self.learner.surroundings.row(),
            **self.learner.row(self.round),
        }

    def do_deferred_work(self) -> None:
        """Do what would delay a rank at another time, while others compute."""
        self._learn_the_rest()
        self.learner.surroundings.read_at_leisure(self.batch.done_at, drivers=not self.learner.predictor.uses_drivers)

    def applying(self, *, waited: bool = False) -> None:
        """Begin the optimizer's update. ``waited``: what came since the last gradient was waiting for others."""
        if self.stopwatch is not None:
            self.stopwatch.start(waited=waited)

    def applied(self, seconds: float) -> None:
        """Add the time of the optimizer's update: it delays the next round's gradient, so it counts as its work."""
        if self.stopwatch is not None:
            self.stopwatch.stop()
        self._apply_s += seconds

    def end_round(self, now: float) -> None:
        """End a round: the synchronisation is over, or is queued."""
        self._learn_the_rest()
        if self.stopwatch is None:
            self._waited_s = (now - self.batch.done_at + self.round.held_s) / self.round.rounds
        else:
            self.stopwatch.lap()
            self._before = self.round
        self.round = OwnRound()

    def forget(self) -> None:
        """Forget the current round."""
        self.batch.forget()
        if self.stopwatch is not None:
            self.stopwatch.forget()
        self.round = OwnRound()
