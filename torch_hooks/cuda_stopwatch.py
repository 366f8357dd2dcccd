"""Times of work that is queued on a CUDA device, by events and without waiting for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hvd_hetero.measurement.speed_meter import SpeedMeter
from hvd_hetero.policies import Policy

__all__ = ["CudaStopwatch", "DeviceTimes"]


class CudaStopwatch:
    """A stopwatch (``hvd_hetero.measurement.speed_meter``) of the stream on which the work is queued.

    An event before and one behind each stretch of work. Starting costs the host about a tenth of a millisecond
    (``benchmarks/gpu/curve.py``), and nothing waits for it. When ``read`` is called the gradients have been summed,
    which needs the work to be done: so the events are complete, and are only asked. Should one not be (Horovod may hand
    back sums that are still on their way, HOROVOD_ENABLE_ASYNC_COMPLETION), the time is not known: NaN.

    A stretch ends where the device comes to its last event: waiting of the device for the host, which launches kernels
    too slowly for a small batch, is in it, as it is in the round.
    """

    def __init__(self, device: torch.device, event: Callable[[], Any] | None = None) -> None:
        self._device = device
        self._new = event or (lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._spare: list[Any] = []
        self._stretches: list[tuple[Any, Any]] = []
        self._began: tuple[Any, Any] | None = None

    def start(self) -> None:
        """What is queued from now on counts."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        self._began = self._record(stream), stream

    def stop(self) -> None:
        """What is queued from now on does not. On the stream of ``start``: a hook may run under another."""
        if self._began is not None:
            begin, stream = self._began
            self._stretches.append((begin, self._record(stream)))
            self._began = None

    def read(self) -> float:
        """The seconds of all stretches since it was read last, or NaN if the device has not come past them."""
        stretches, self._stretches = self._stretches, []
        # The last is behind the others, but perhaps on another stream.
        if not all(end.query() for _, end in stretches):
            return math.nan  # and its events are not used again, for they are still to be passed
        seconds = sum(begin.elapsed_time(end) for begin, end in stretches) / 1000.0
        self._spare += (event for stretch in stretches for event in stretch)
        return float(seconds)

    def _record(self, stream: Any) -> Any:
        event = self._spare.pop() if self._spare else self._new()
        event.record(stream)
        return event


class DeviceTimes:
    """Sees to it that work on a device is timed there, if its time matters to the policy."""

    def __init__(self, policy: Policy, meter: SpeedMeter) -> None:
        self._policy = policy
        self._meter = meter
        self._device: torch.device | None = None

    def include(self, names: Mapping[torch.Tensor, str]) -> None:
        """Parameters are trained: have a stopwatch for the device that they are on."""
        for parameter, name in names.items():
            device = parameter.device
            self._meter.queued |= device.type != "cpu"
            if device.type == "cpu" or not self._policy.measures:
                continue
            if device.type != "cuda" or self._device not in (None, device):
                where = device if device.type != "cuda" else f"several devices ({self._device}, {device})"
                raise ValueError(
                    f"policy {self._policy.name!r} cannot time {where}, where {name!r} is, but only the CPU and one "
                    "CUDA device per rank; use policy='bsp' or StaticAllocation([…]) there"
                )
            if self._device is None:
                self._device = device
                self._meter.stopwatch = CudaStopwatch(device)
