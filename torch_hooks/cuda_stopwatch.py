"""Times of work that is queued on a CUDA device, by events."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_hetero.measurement.batch_timer import Passes
from hvd_hetero.measurement.speed_meter import SpeedMeter
from hvd_hetero.measurement.stopwatch import Lap

_Stretch = tuple[Any, Any]  # from one event to another


class CudaStopwatch:
    """A stopwatch (``hvd_hetero.measurement.stopwatch``) of the stream on which the work is queued.

    An event before and one behind each stretch of work, and one at the end of the round. Only `read` and `catch_up`
    wait for the device. A stretch includes the device's waiting for a host that launches kernels too slowly.
    """

    def __init__(self, device: torch.device, event: Callable[[], Any] | None = None) -> None:
        self._device = device
        # Blocking: a thread that waits for an event is asleep.
        self._new = event or (lambda: torch.cuda.Event(enable_timing=True, blocking=True))  # type: ignore[no-untyped-call]
        self._spare: list[Any] = []
        self._now = _Queued()
        self._lap = _Queued()
        self._began: tuple[Any, Any] | None = None
        self._passes = Passes()

    def start(self, *, waited: bool = False) -> None:
        """Count what is queued from now on. ``waited``: what came since the last `stop` was waiting for others."""
        stream = self._stream()
        self._began = self._record(stream), stream
        if not waited:
            self._now.first = len(self._now.work)
        if (last := self._now.last) is not None:
            (self._now.waits if waited else self._now.pauses).append((last, self._began[0]))

    def stop(self) -> None:
        """Stop counting what is queued from now on. On the stream of ``start``: a hook may run under another."""
        if self._began is not None:
            begin, stream = self._began
            self._now.work.append((begin, self._record(stream)))
            self._began = None

    def forward_done(self, samples: int) -> None:
        """Note that a forward pass is queued; until the next `start`, what counts is its backward pass."""
        if self._began is not None:
            begin, stream = self._began
            self._began = self._record(stream), stream
            self._now.work.append((begin, self._began[0]))
            self._now.passes.append((self._now.first, len(self._now.work), samples))

    def keep(self) -> None:
        """Note that one of several rounds of a lap is queued to its end, which `forget` leaves."""
        now = self._now
        now.kept = len(now.work), len(now.waits), len(now.pauses), len(now.passes)

    def lap(self) -> None:
        """Note that a round is queued to its end. What came since the last `stop` was waiting for others."""
        end = None
        if self._now.work:
            end = self._record(self._stream())
            self._now.waits.append((self._now.work[-1][1], end))
        self._lap, self._now = self._now, _Queued(since=end)

    def read(self) -> Lap:
        """Return the seconds of the last lap, once it is done; NaN if there was none."""
        lap, self._lap = self._lap, _Queued()
        if not lap.work:
            return Lap(math.nan, math.nan, math.nan)
        events = [*dict.fromkeys(event for stretch in lap.work for event in stretch)]
        # The last event is behind the others, but perhaps on another stream.
        for event in (*events, lap.waits[-1][1]):
            if not event.query():
                event.synchronize()
        # The next lap still counts from the end of this one, so it is this one's beginning that can be used again.
        known = lap.since is not None
        self._spare += [*events, lap.since] if known else events
        excess_s = self._excess_s(lap)
        paused_s = _seconds(lap.pauses) + excess_s if known else math.nan
        return Lap(_seconds(lap.work) - excess_s, _seconds(lap.waits), paused_s)

    def _excess_s(self, lap: _Queued) -> float:
        ends = [first for first, _, _ in lap.passes[1:]] + [len(lap.work)]
        return sum(
            self._passes.excess_s(_seconds(lap.work[first:middle]), _seconds(lap.work[middle:end]), samples)
            for (first, middle, samples), end in zip(lap.passes, ends, strict=False)
        )

    def forget(self) -> None:
        """Forget what was queued since `keep`, or the last lap. Its events, still to be passed, are not used again."""
        now, self._began = self._now, None
        lists: tuple[list[Any], ...] = now.work, now.waits, now.pauses, now.passes
        for each, kept in zip(lists, now.kept, strict=True):
            del each[kept:]

    def catch_up(self) -> None:
        """Return when all that is queued is done."""
        event = self._record(self._stream())
        event.synchronize()
        self._spare.append(event)

    def _stream(self) -> Any:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def _record(self, stream: Any) -> Any:
        event = self._spare.pop() if self._spare else self._new()
        event.record(stream)
        return event


@dataclass(slots=True)
class _Queued:
    """Events of a lap."""

    since: Any = None
    """The end of the lap before."""
    work: list[_Stretch] = field(default_factory=list)
    waits: list[_Stretch] = field(default_factory=list)
    pauses: list[_Stretch] = field(default_factory=list)
    first: int = 0
    """Where the work on the latest micro-batch begins."""
    passes: list[tuple[int, int, int]] = field(default_factory=list)
    """Of micro-batches: where their work begins, where their backward pass does, and their samples."""
    kept: tuple[int, int, int, int] = (0, 0, 0, 0)
    """How long the lists were when the latest finished round was."""

    @property
    def last(self) -> Any:
        """The event at which work ended last."""
        return self.work[-1][1] if self.work else self.since


def _seconds(stretches: list[_Stretch]) -> float:
    return float(sum(begin.elapsed_time(end) for begin, end in stretches)) / 1000.0


class DeviceTimes:
    """Makes sure that work on a device is timed there.

    ``needed``: times matter to ``policy``, so what cannot be timed is refused.
    """

    def __init__(self, policy: str, meter: SpeedMeter, *, needed: bool) -> None:
        self._policy, self._meter, self._needed = policy, meter, needed
        self._device: torch.device | None = None

    def include(self, names: Mapping[torch.Tensor, str]) -> None:
        """Take parameters that are trained, and make a stopwatch for their device."""
        for parameter, name in names.items():
            device = parameter.device
            if device.type == "cpu" or device == self._device:
                continue
            self._meter.queued = True
            if device.type == "cuda" and self._device is None:
                self._meter.stopwatch = CudaStopwatch(device)
            elif self._needed:
                where = device if device.type != "cuda" else f"several devices ({self._device}, {device})"
                raise ValueError(
                    f"policy {self._policy!r} can time the CPU and one CUDA device per rank, but {name!r} is on "
                    f"{where}; use policy='bsp' or StaticAllocation([…])"
                )
            else:
                self._meter.stopwatch = None
            self._device = device
