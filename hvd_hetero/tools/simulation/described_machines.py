"""The ``[[workers]]`` and the ``[network]`` of a description (``docs/simulation.md``)."""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from hvd_hetero.rounds import MAX_ROUND_SAMPLES
from hvd_hetero.telemetry.files import open_file
from hvd_hetero.tools.simulation.availability import Availability
from hvd_hetero.tools.simulation.cluster import Drivers, Worker
from hvd_hetero.tools.simulation.compute import Compute
from hvd_hetero.tools.simulation.network import KINDS, Network
from hvd_hetero.tools.simulation.settings import (
    LONGEST_S,
    MAX_RATIO,
    MAX_SPEED,
    MAX_WORKERS,
    REQUIRED,
    Setting,
    checked,
    read,
    shown,
)
from hvd_hetero.tools.simulation.variation import PER, Exponential, Jitter, RandomSlowDown, Recorded, Variation

T = TypeVar("T")
_BYTES_PER_MBIT = 1e6 / 8
# A worker on a machine that others use up would never be done (arbitrary).
_AVAILABLE_AT_LEAST = 0.01

MILLISECONDS = Setting(float, 0.0, 0, 1e3 * LONGEST_S, "milliseconds, 0 for none")
_MBPS = "megabits per second; leave it out for a link that takes no time"
_SECONDS = Setting(float, least=0, most=LONGEST_S, of="the seconds that the transfer of a round takes")
_FACTOR = Setting(float, 1.0, 1 / MAX_RATIO, MAX_RATIO, "a factor; 2 is twice")
_SAMPLES = "samples; leave it out where there is no such limit"

_WORKER = {
    "count": Setting(int, 1, 1, MAX_WORKERS, f"the workers of this kind; a cluster may have {MAX_WORKERS}"),
    "samples_per_s": Setting(float, None, 1 / MAX_RATIO, MAX_SPEED, "samples per second"),
    "slope_ms": Setting(float, None, 1e3 / MAX_SPEED, 1e3 * MAX_RATIO, "milliseconds per sample"),
    "fixed_ms": MILLISECONDS,
    "saturation": Setting(float, 1.0, 1, MAX_ROUND_SAMPLES, _SAMPLES),
    "memory_limit": Setting(int, None, 1, MAX_ROUND_SAMPLES, _SAMPLES),
    "availability": Setting(dict, None),
    "variation": Setting(list, ()),
    "bandwidth_mbps": Setting(float, None, 1 / MAX_RATIO, of=_MBPS),
    "link": Setting(dict, None),
    "drivers": Setting(dict, None),
}
_DRIVERS = {**Drivers.settings, "memory": Setting(dict, None)}
_COLUMN = {"file": Setting(str), "column": Setting(str), "where": Setting(str, None), "equals": Setting(str, None)}
_TRACE = _COLUMN | {
    "step_s": Setting(float, REQUIRED, 1 / MAX_RATIO, MAX_SPEED, "seconds"),
    "scale": _FACTOR,
    "used": Setting(bool, False),
    "repeat": Setting(bool, True),
}
_VARIATIONS: dict[str, type[Variation]] = {
    "exponential": Exponential,
    "slow-down": RandomSlowDown,
    "jitter": Jitter,
    "recorded": Recorded,
}
_VARIATION = {"kind": Setting(str, known=_VARIATIONS), "per": PER}
_NETWORK = {
    "kind": KINDS,
    "latency_ms": MILLISECONDS,
    "message_mb": Setting(float, 0.0, 0, 1e9, "megabytes of gradients"),
    "bandwidth_mbps": Setting(float, math.inf, 1 / MAX_RATIO, of=_MBPS),
    "server_bandwidth_mbps": Setting(float, math.inf, 1 / MAX_RATIO, of=_MBPS),
}


def read_workers(entries: list[Any], where: str, folder: Path) -> tuple[Worker, ...]:
    """Return the workers of a description, whose paths are relative to this folder."""
    found: list[Worker] = []
    for number, entry in enumerate(entries):
        place = f"{where}.workers[{number}]"
        values = read(entry, _WORKER, place)
        found += [_worker(values, place, folder)] * values["count"]
        if len(found) > MAX_WORKERS:
            raise ValueError(f"{place}: count must leave at most {MAX_WORKERS} workers in all, got {len(found)}")
    if not found:
        raise ValueError(f"{where} needs at least one [[workers]] table, and has none")
    return tuple(found)


def _worker(values: dict[str, Any], where: str, folder: Path) -> Worker:
    speed, slope_ms, mbps = values["samples_per_s"], values["slope_ms"], values["bandwidth_mbps"]
    if (speed is None) == (slope_ms is None):
        raise ValueError(
            f"{where}: give either samples_per_s (time proportional to the batch) or slope_ms (per sample)"
        )
    slope_s = slope_ms / 1e3 if speed is None else 1.0 / speed
    compute = _made(where, Compute, slope_s, values["fixed_ms"] / 1e3, values["saturation"], values["memory_limit"])
    drivers = {} if values["drivers"] is None else read(values["drivers"], _DRIVERS, f"{where}.drivers")
    if drivers:
        drivers["memory"] = drivers["memory"] and _availability(drivers["memory"], f"{where}.drivers.memory", folder)
    return Worker(
        compute,
        _availability(values["availability"], f"{where}.availability", folder),
        tuple(_variation(entry, f"{where}.variation", folder) for entry in values["variation"]),
        None if mbps is None else mbps * _BYTES_PER_MBIT,
        _availability(values["link"], f"{where}.link", folder),
        Drivers(**drivers),
    )


def _made(where: str, kind: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Return an object whose own rules hold; an error names the table."""
    try:
        return kind(*arguments, **named)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _availability(table: Any, where: str, folder: Path) -> Availability:
    if table is None:
        return Availability()
    if "file" not in table:
        return _made(where, Availability, **read(table, Availability.settings, where))
    values = read(table, _TRACE, where)
    scale, within = values["scale"], Availability.settings["share"]
    if values["used"]:
        bounds = Setting(float, least=0, most=1 / scale, of="the share that others use, times 1 / scale")
        # A share of 0 would never end.
        shares = [max(1.0 - scale * used, _AVAILABLE_AT_LEAST) for used in _column(values, bounds, where, folder)]
    else:
        bounds = Setting(float, least=within.least / scale, most=within.most / scale, of=within.of)
        shares = [scale * share for share in _column(values, bounds, where, folder)]
    return _made(where, Availability.series, shares, values["step_s"], repeat=values["repeat"])


def _variation(table: Any, where: str, folder: Path) -> Variation:
    kind = _VARIATIONS[read(table, _VARIATION, where, more=True)["kind"]]
    values = read(table, _VARIATION | (_COLUMN if kind is Recorded else kind.settings), where)
    if kind is Recorded:
        return Recorded(values["per"], tuple(_column(values, _FACTOR, where, folder)))
    return kind(values["per"], **{name: values[name] for name in kind.settings})


def read_network(table: Any, where: str, folder: Path) -> Network:
    """Return the network that a table describes; its file's path is relative to the folder."""
    values = read(table, _NETWORK, where, more=True)
    if values["kind"] == "recorded":
        values = read(table, {"kind": _NETWORK["kind"], **_COLUMN}, where)
        return Network("recorded", recorded_s=tuple(_column(values, _SECONDS, where, folder)))
    values = read(table, _NETWORK, where)
    return Network(
        values["kind"],
        latency_s=values["latency_ms"] / 1e3,
        message_bytes=values["message_mb"] * 1e6,
        bandwidth=values["bandwidth_mbps"] * _BYTES_PER_MBIT,
        server_bandwidth=values["server_bandwidth_mbps"] * _BYTES_PER_MBIT,
    )


def _column(values: dict[str, Any], within: Setting, where: str, folder: Path) -> list[float]:
    """Return the numbers of one column of a CSV file, gzipped or not; of one series if the file holds several."""
    if (values["where"] is None) != (values["equals"] is None):
        raise ValueError(f"{where}: where and equals go together (a column and its text); give both or none")
    try:
        numbers = list(_numbers(folder / values["file"], within, values["column"], values["where"], values["equals"]))
        if not numbers:
            raise ValueError("it has no such rows; name a column that has numbers")
    except (csv.Error, EOFError, zlib.error, OSError, ValueError) as error:
        raise ValueError(f"{where}: {shown(values['file'])}: {error}") from None
    return numbers


def _numbers(path: Path, within: Setting, name: str, only: str | None, value: str | None) -> Iterator[float]:
    raw = open_file(path)
    unpacked = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
    with raw, io.TextIOWrapper(unpacked, encoding="utf-8", newline="") as text:
        rows = csv.DictReader(text)
        for needed in (name, only):
            if needed is not None and needed not in (rows.fieldnames or ()):
                known = ", ".join(map(shown, (rows.fieldnames or ())[:20]))
                raise ValueError(f"it has no column {shown(needed)}; it has {known or 'none'}")
        for row in rows:
            if only is None or row[only] == value:
                try:
                    number: Any = float(row[name] or "")
                except ValueError:
                    number = row[name]
                yield checked(f"line {rows.line_num}: {shown(name)}", number, within)
