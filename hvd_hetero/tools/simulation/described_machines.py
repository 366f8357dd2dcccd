"""The ``[[workers]]`` and the ``[network]`` of a description (``docs/simulation.md``)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hvd_hetero.rounds import MAX_ROUND_SAMPLES
from hvd_hetero.tools.simulation import limits
from hvd_hetero.tools.simulation.availability import ALWAYS, Availability
from hvd_hetero.tools.simulation.cluster import Drivers, Worker
from hvd_hetero.tools.simulation.compute import Compute
from hvd_hetero.tools.simulation.network import Network
from hvd_hetero.tools.simulation.series import column
from hvd_hetero.tools.simulation.settings import Range, Settings, shown
from hvd_hetero.tools.simulation.variation import Exponential, Jitter, RandomSlowDown, Recorded, Variation

_BYTES_PER_MBIT = 1e6 / 8

MILLISECONDS = Range(0, 1e3 * limits.LONGEST_S, "milliseconds, 0 for none")
_BANDWIDTH = Range(1 / limits.MOST_RATIO, math.inf, "megabits per second; leave it out for a link that takes no time")
_SPEED = Range(1 / limits.MOST_RATIO, limits.MOST_SPEED, "samples per second")
_SLOPE_MS = Range(1e3 / limits.MOST_SPEED, 1e3 * limits.MOST_RATIO, "milliseconds per sample")
_SAMPLES = Range(1, MAX_ROUND_SAMPLES, "samples; leave it out where there is no such limit")
_MOMENT = Range(1 / limits.MOST_RATIO, limits.MOST_SPEED, "seconds")
_SHARE = Range(
    1 / limits.MOST_RATIO,
    limits.MOST_RATIO,
    "a share; a worker that stops for good would never finish: use a small one",
)
_FACTOR = Range(1 / limits.MOST_RATIO, limits.MOST_RATIO, "a factor; 2 is twice")
_LEAST_LEFT = 0.01  # of a machine that others use: a share of 0 never ends (arbitrary)
_SECONDS = Range(0, limits.LONGEST_S, "the seconds that the transfer of a round takes")
_OF_WORKERS = f"the workers of this kind; a cluster may have {limits.MOST_WORKERS}"


def _mapping(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a table of settings, got {shown(entry)}")
    return entry


def read_workers(top: Settings, folder: Path) -> tuple[Worker, ...]:
    """Return the workers of a description, whose paths are relative to this folder."""
    found: list[Worker] = []
    for number, entry in enumerate(top.take("workers", list)):
        settings = Settings(_mapping(entry, f"{top.where}.workers[{number}]"), f"{top.where}.workers[{number}]")
        count = settings.whole("count", Range(1, limits.MOST_WORKERS - len(found), _OF_WORKERS), 1)
        try:
            found += [_worker(settings, folder)] * count
        except ValueError as error:
            raise ValueError(str(error) if settings.where in str(error) else f"{settings.where}: {error}") from None
        settings.finish()
    if not found:
        raise ValueError(f"{top.where} needs at least one [[workers]] table, and has none")
    return tuple(found)


def _worker(settings: Settings, folder: Path) -> Worker:
    speed = settings.number("samples_per_s", _SPEED, None)
    slope_ms = settings.number("slope_ms", _SLOPE_MS, None)
    if (speed is None) == (slope_ms is None):
        hint = settings.misspelt("samples_per_s") or settings.misspelt("slope_ms") if speed is None else ""
        raise ValueError(f"give either samples_per_s (time proportional to the batch) or slope_ms (per sample){hint}")
    compute = Compute(
        1.0 / speed if speed is not None else (slope_ms or 0.0) / 1e3,
        settings.number("fixed_ms", MILLISECONDS, 0.0) / 1e3,
        settings.number("saturation", _SAMPLES, 1.0),
        settings.whole("memory_limit", _SAMPLES, None),
    )
    own_mbps = settings.number("bandwidth_mbps", _BANDWIDTH, None)
    variation = tuple(_variation(v, settings.where, folder) for v in settings.take("variation", list, []))
    return Worker(
        compute,
        _availability(settings.table("availability"), folder) or ALWAYS,
        variation,
        None if own_mbps is None else own_mbps * _BYTES_PER_MBIT,
        _availability(settings.table("link"), folder) or ALWAYS,
        _drivers(settings.table("drivers"), folder),
    )


def _drivers(settings: Settings | None, folder: Path) -> Drivers:
    if settings is None:
        return Drivers()
    drivers = Drivers(
        settings.take("known", bool, True),
        settings.number("lag_s", Range(0, limits.LONGEST_S, "seconds"), 0.0),
        settings.number("noise", Range(0, 1, "the standard deviation of a share"), 0.0),
        _availability(settings.table("memory"), folder),
    )
    settings.finish()
    return drivers


def _availability(settings: Settings | None, folder: Path) -> Availability | None:
    if settings is None:
        return None
    try:
        if "file" in settings:
            scale = settings.number("scale", _FACTOR, 1.0)
            if settings.take("used", bool, False):
                used = column(settings, folder, Range(0, 1 / scale, "the share that others use, times 1 / scale"))
                shares = [max(1.0 - scale * v, _LEAST_LEFT) for v in used]
            else:
                within = Range(_SHARE.least / scale, _SHARE.most / scale, _SHARE.of)
                shares = [scale * v for v in column(settings, folder, within)]
            step_s, repeat = settings.number("step_s", _MOMENT), settings.take("repeat", bool, True)
            process = Availability.series(shares, step_s, repeat=repeat)
        else:
            at_s = settings.numbers("at_s", Range(0, _MOMENT.most, "the seconds of a change"), [0.0])
            share = settings.numbers("share", _SHARE)
            process = Availability(at_s, share, settings.number("period_s", _MOMENT, None))
    except ValueError as error:
        raise ValueError(str(error) if settings.where in str(error) else f"{settings.where}: {error}") from None
    settings.finish()
    return process


def _variation(entry: Any, where: str, folder: Path) -> Variation:
    settings = Settings(_mapping(entry, where), f"{where}.variation")
    kind = settings.choice("kind", ("exponential", "slow-down", "jitter", "recorded"))
    per = settings.choice("per", ("round", "batch"), "round")
    made: Variation
    if kind == "exponential":
        made = Exponential(per)  # type: ignore[arg-type]
    elif kind == "slow-down":
        most = settings.number("most", Range(1, limits.MOST_RATIO, "times as long at most; 2 is twice"), 2.0)
        probability = settings.number("probability", Range(0, 1, "the share of batches that are slow"), 1.0)
        made = RandomSlowDown(per, most, probability)  # type: ignore[arg-type]
    elif kind == "jitter":
        sigma = settings.number("sigma", Range(0, 3, "a relative deviation; 0.02 is about 2 %"), 0.02)
        made = Jitter(per, sigma)  # type: ignore[arg-type]
    else:
        made = Recorded(per, tuple(column(settings, folder, _FACTOR)))  # type: ignore[arg-type]
    settings.finish()
    return made


def read_network(settings: Settings, folder: Path) -> Network:
    """Return the network that a table describes; its file's path is relative to the folder."""
    kind = settings.choice("kind", ("ring", "server", "recorded"), "ring")
    if kind == "recorded":
        network = Network("recorded", recorded_s=tuple(column(settings, folder, _SECONDS)))
    else:
        network = Network(
            "server" if kind == "server" else "ring",
            latency_s=settings.number("latency_ms", MILLISECONDS, 0.0) / 1e3,
            message_bytes=settings.number("message_mb", Range(0, 1e9, "megabytes of gradients"), 0.0) * 1e6,
            bandwidth=settings.number("bandwidth_mbps", _BANDWIDTH, math.inf) * _BYTES_PER_MBIT,
            server_bandwidth=settings.number("server_bandwidth_mbps", _BANDWIDTH, math.inf) * _BYTES_PER_MBIT,
        )
    settings.finish()
    return network
