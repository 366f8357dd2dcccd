"""One rank's measurements of itself: how long it computes and waits for data, and what speed it expects next.

A speed is samples over the seconds that the rank was at work: forward, backward and update, and waiting for its own
data, since all of that moves with the samples. For policies that weigh it, the part that does not move with the samples
is separated (``fixed_cost``), and the speed refers to a micro-batch of the typical size. Waiting for the other ranks
is in neither: not at the end of a round, and not inside a micro-batch, where a layer exchanges with them. Otherwise a
fast rank would seem as slow as the one it waits for.

On a processor whose work runs behind the clock (an accelerator with a queue), a ``Stopwatch`` takes the times. It knows
a round's times only when the queue has come past it. So there, this rank reports and learns from the round before: it
asks when all of this round is queued. A host that is ahead then waits for the device, which has work meanwhile.
Waiting for data costs such a host nothing while the device is at work, so it counts only as long as the device paused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import add
from typing import TYPE_CHECKING, Any

from hvd_hetero.measurement.fixed_cost import Pace
from hvd_hetero.measurement.hindrances import HindranceMeter, Hindrances
from hvd_hetero.measurement.memory_limits import limit_after
from hvd_hetero.measurement.passes import Passes
from hvd_hetero.measurement.readings import ResourceMeter
from hvd_hetero.measurement.stopwatch import Stopwatch
from hvd_hetero.prediction.base import Predictor
from hvd_hetero.rounds import NO_SAMPLES, MicroBatch, SampleFigures

if TYPE_CHECKING:
    from hvd_hetero.measurement.cost_meter import CostMeter
    from hvd_hetero.measurement.device_profile import DeviceProfile

# The first round of a job pays for buffers, kernels and caches that no later one pays for; its speed predicts nothing.
_WARM_UP_ROUNDS = 1

# How often figures that serve only the report are read.
_LEISURE_S = 1.0

# Rounds of less work than this are learned from, if possible, while the rank waits for others. Learning takes up to a
# third of a millisecond, for which all would wait; the report is then a round old, which costs a round at the old split
# after each change.
_SHORT_S = 0.01


@dataclass(slots=True)
class _Round:
    samples: int = 0
    weight: float = 0.0
    figures: SampleFigures = NO_SAMPLES
    micro_batches: int = 0
    compute_s: float = 0.0
    input_s: float = 0.0
    disturbed: bool = False
    teaches: bool = False
    """True: its speed tells something about later rounds."""
    once_s: float = 0.0
    """What comes once a round: the update before it, or in it, and waiting for its first micro-batch."""
    held_s: float = 0.0
    """Seconds that layers, and others behind the rank's work, kept it waiting."""
    rounds: int = 1
    """Rounds that these are the sums of, where a row tells of several."""
    planned: int = 0
    """Micro-batches that the policy counts, where these are done in others; 0: those that are done."""

    def __add__(self, other: _Round) -> _Round:
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return _Round(**sums | {"figures": SampleFigures(*map(add, self.figures, other.figures))})


class SpeedMeter:
    """The measurements and predictions of one rank."""

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
        self._clock = clock
        self._readings, self._hindrances = readings, hindrances
        self._hindered = {} if hindrances is None else Hindrances().row()
        self.predictor, self.profile = predictor, profile
        self.pace = Pace(typical_size) if weighs_fixed_cost else None
        self.costs: CostMeter | None = None
        """What samples of unequal lengths cost; None: as many as they are."""
        self.stopwatch: Stopwatch | None = None
        self.rests = True
        """True: `rest` is called while others compute."""
        self.queued = False
        """True: a device works on after the clock was read, whether a stopwatch follows it or not."""
        self.limit = 0
        """The largest micro-batch that fits in memory; 0: none has failed."""
        self.round = _Round()
        """The current round."""
        self._before = _Round(compute_s=math.nan, input_s=math.nan)
        """The round before it, whose times a stopwatch gives."""
        self._unlearned: _Round | None = None
        """A round that is still to be learned from."""
        self._apply_s = 0.0
        self._closed: _Round | None = None
        """Finished rounds that are in no row yet."""
        self._passes = Passes()
        self._forward_s = math.nan
        """Seconds of this micro-batch until its loss was there, if that was noted."""
        self._running = False
        """True: a micro-batch is being computed."""
        self._held_s = 0.0
        """Seconds that this micro-batch has spent waiting for other ranks."""
        self._holds_since = math.nan
        """When the wait at hand began; NaN: there is none."""
        self._rounds = 0
        self.reads = False
        """True: a stopwatch is read, which waits for the end of a round that other ranks take part in."""
        self._waited_s = math.nan
        """How long others, and the transfer, kept this rank waiting in the round before."""
        self._lap_s = 0.0
        """How long the round before took, by a stopwatch."""
        self.cpu, self.memory = self._drivers()
        self._read_at = clock()
        self._began_at = self.done_at = clock()

    @property
    def busy_s(self) -> float:
        """The time of the current round so far, during a micro-batch, as the table will count it."""
        at_work_s = self._clock() - self._began_at - self._held_s
        return self._apply_s + self.round.compute_s + self.round.input_s + at_work_s

    def begin(self, input_s: float) -> None:
        """Start computing a micro-batch that has arrived after ``input_s`` seconds."""
        self.round.input_s += input_s
        if self.stopwatch is not None:
            self.stopwatch.start()
        self._running, self._held_s, self._forward_s = True, 0.0, math.nan
        self._began_at = self._clock()
        if not self.round.micro_batches:
            self.round.once_s = self._apply_s + self.round.input_s

    def forward_done(self, samples: int) -> None:
        """Note that the loss of the micro-batch is there, and only its backward pass follows."""
        self._forward_s = self._clock() - self._began_at - self._held_s
        if self.stopwatch is not None:
            self.stopwatch.forward_done(samples)

    def done(self, samples: int, weight: float | None = None, figures: SampleFigures | None = None) -> None:
        """Note that the micro-batch is computed; a second call changes nothing."""
        if not self._running:
            return
        self.release()
        self._running = False
        self.done_at = self._clock()
        own_s = self.done_at - self._began_at - self._held_s
        if not math.isnan(self._forward_s):
            own_s -= self._passes.excess_s(self._forward_s, own_s - self._forward_s, samples)
        self.round.compute_s += own_s
        self.round.held_s += self._held_s
        self.round.samples += samples
        self.round.weight += samples if weight is None else weight
        if figures is not None:
            self.round.figures = SampleFigures(*map(add, self.round.figures, figures))
        self.round.micro_batches += 1 if samples else 0
        if self.stopwatch is not None:
            self.stopwatch.stop()

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Around what waits for other ranks while a micro-batch is at work; at other times nothing is measured."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        """Begin to wait for others; until `release`, nothing counts as the rank's work."""
        if self._running and math.isnan(self._holds_since):
            if self.stopwatch is not None:
                self.stopwatch.stop()
            self._holds_since = self._clock()

    def release(self) -> None:
        """End the wait, if there was one."""
        if not math.isnan(self._holds_since):
            self._held_s += self._clock() - self._holds_since
            self._holds_since = math.nan
            if self.stopwatch is not None:
                self.stopwatch.start(waited=True)

    def waited(self, seconds: float) -> None:
        """After its work on a micro-batch, the rank has waited for others this long."""
        self.round.held_s += seconds

    def failed(self, size: int, *, cramped: bool = False) -> int:
        """Return how large the parts of a micro-batch may be that did not fit. Its time says nothing about speed.

        ``cramped``: something else may still have held memory, so the failure says nothing about the size.
        """
        if not cramped:
            self.limit = limit_after(size, self.limit)
        self._running = False
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
        self.round = _Round()
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
        busy_s = known.compute_s + known.input_s
        if known.samples and 0.0 < busy_s < math.inf and known.teaches:
            if self.rests and busy_s < _SHORT_S and not self.predictor.uses_drivers:
                self._unlearned = known
            else:
                self._learn(known)
        # A speed goes with the drivers read before its round, a prediction with the present ones (lb-bsp, Eq. 4).
        # Reading them takes most of a millisecond, for which all ranks would wait: a rank that does not use them reads
        # them later.
        if self.predictor.uses_drivers:
            self.cpu, self.memory = self._drivers()

    def _learn_the_rest(self) -> None:
        if (known := self._unlearned) is not None:
            self._unlearned = None
            self._learn(known)
            self.expected()  # what a predictor computes once for a forecast is ready before the row has to leave

    def _learn(self, known: _Round) -> None:
        count, seconds = known.planned or known.micro_batches, known.compute_s + known.input_s
        if self.costs is not None and round(known.figures.number) == known.samples:
            self.costs.learn(known.figures, known.micro_batches, seconds)
        size, seconds = self.work_of(known) / count, seconds / count
        speed = size / seconds
        if self.pace is not None:
            self.pace.size = size
            speed = self.pace.of(size, seconds)
        self.predictor.update(speed, cpu=self.cpu, memory=self.memory)
        if self.profile is not None:
            self.profile.observe(round(size), seconds)

    def learns_costs(self) -> CostMeter:
        """Learn from now on what samples cost by their lengths, and return what learns it."""
        if self.costs is None:
            from hvd_hetero.measurement.cost_meter import CostMeter  # SciPy takes some tenths of a second

            self.costs = CostMeter()
        return self.costs

    def work_of(self, known: _Round | MicroBatch) -> float:
        """Return samples, each as many as it costs of a mean one, or as one if its length is not known."""
        if self.costs is None or known.figures is None:
            return known.samples
        return self.costs.work_of(known.figures) + known.samples - known.figures.number

    def most_of(self, work: MicroBatch) -> int:
        """Return how many of a micro-batch's samples fit in memory, if they are too many; else 0."""
        whole = self.work_of(work)
        return max(int(self.limit / whole * work.samples), 1) if 0 < self.limit < whole else 0

    def expected(self) -> float:
        """Return the speed that the rank predicts now, with a typical micro-batch; NaN: nothing was measured."""
        expected = self.predictor.predict(cpu=self.cpu, memory=self.memory)
        return expected if self.pace is None else self.pace.speed(expected)

    def row(self) -> dict[str, float]:
        """Return this rank's figures for the table, after `learn`: means, if they are of several rounds."""
        known = self.round if self.stopwatch is None else self._before
        gamma = None if self.profile is None else self.profile.gamma
        return {
            "samples": self.round.samples / self.round.rounds,
            "micro_batches": (self.round.planned or self.round.micro_batches) / self.round.rounds,
            "compute_s": known.compute_s / known.rounds,
            "input_s": known.input_s / known.rounds,
            "wait_s": self._waited_s,
            "lap_s": 0.0 if self.stopwatch is None else self._lap_s,
            "samples_per_s": self.expected(),
            "cpu": self.cpu,
            "memory": self.memory,
            "slope_s": 0.0 if gamma is None else gamma.slope_s,
            "intercept_s": 0.0 if gamma is None else gamma.intercept_s,
            "saturation": 0.0 if gamma is None else gamma.saturation,
            "limit": self.limit,
            "timed_samples": self.work_of(known) / known.rounds if known.teaches else 0,
            "once_s": self.round.once_s / known.rounds if self.stopwatch is None and self.round.micro_batches else 0.0,
            "fixed_samples": 0.0 if self.pace is None else self.pace.samples,
            "weight": self.round.weight / self.round.rounds,
            **self._hindered,
            **({} if self.costs is None else self._costs_row(self.costs)),
        }

    def _costs_row(self, costs: CostMeter) -> dict[str, float]:
        figures, rule = self.round.figures, costs.rule
        unpadded = figures._replace(padded=figures.length, padded_square=figures.square)
        whole = rule.of(figures)
        return {
            "work": self.work_of(self.round) / self.round.rounds,
            "padding": 1.0 - rule.of(unpadded) / whole if whole else 0.0,
            "by_number": costs.by_number,
            **{f"cost_{name}": of for name, of in rule._asdict().items() if costs.learned},
        }

    def rest(self) -> None:
        """Do what would delay a rank at another time, while others compute."""
        self._learn_the_rest()
        if self.done_at - self._read_at > _LEISURE_S:
            self._read_at = self.done_at
            if not self.predictor.uses_drivers:
                self.cpu, self.memory = self._drivers()
            if self._hindrances is not None:
                self._hindered = self._hindrances.read().row()

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
            self._waited_s = (now - self.done_at + self.round.held_s) / self.round.rounds
        else:
            self.stopwatch.lap()
            self._before = self.round
        self.round = _Round()

    @property
    def was_held_up(self) -> bool:
        """True if layers made this rank wait for others in this round."""
        return self.round.held_s > 0

    def forget(self) -> None:
        """Forget the current round."""
        self._running, self._holds_since = False, math.nan
        if self.stopwatch is not None:
            self.stopwatch.forget()
        self.round = _Round()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has learned about itself, as plain data."""
        state = {"predictor": self.predictor.state_dict(), "limit": self.limit, "rounds": self._rounds}
        if self.profile is not None:
            state["profile"] = self.profile.state_dict()
        if self.pace is not None:
            state["pace"] = self.pace.state_dict()
        if self.costs is not None:
            state["costs"] = self.costs.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where it left off."""
        self.predictor.load_state_dict(state["predictor"])
        self.limit = int(state["limit"])
        self._rounds = 0  # a new process warms up again
        if self.profile is not None and "profile" in state:
            self.profile.load_state_dict(state["profile"])
        if self.pace is not None and "pace" in state:
            self.pace.load_state_dict(state["pace"])
        if "costs" in state:
            self.learns_costs().load_state_dict(state["costs"])

    def _drivers(self) -> tuple[float, float]:
        if self._readings is None:
            return float("nan"), float("nan")
        reading = self._readings.read()
        return reading.cpu, reading.memory
