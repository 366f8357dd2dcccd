"""From a file ``cluster.toml`` to the cluster and the training that it describes (``docs/simulation.md``)."""

from __future__ import annotations

import csv
import gzip
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_hetero.policies import SelfAdaptive
from hvd_hetero.simulation.availability import ALWAYS, Availability
from hvd_hetero.simulation.cluster import Cluster, Drivers, Worker
from hvd_hetero.simulation.compute import Compute
from hvd_hetero.simulation.engine import mixing_on
from hvd_hetero.simulation.network import Network
from hvd_hetero.simulation.schemes import SchemeChoice, choose
from hvd_hetero.simulation.strict import Settings
from hvd_hetero.simulation.variation import Exponential, Jitter, Recorded, SlowDown, Variation

__all__ = ["Description", "check", "read_description"]

_BYTES_PER_MBIT = 1e6 / 8


@dataclass(frozen=True, slots=True)
class Description:
    """What a file describes."""

    cluster: Cluster
    global_batch: int
    rounds: int
    """how many rounds of ``global_batch`` samples each scheme is to train on"""
    schemes: tuple[SchemeChoice, ...]
    lead: int = 0
    signal_s: float = 0.0
    dataset: int | None = None
    """samples of an epoch; None: endless"""
    problem: str | None = None
    learning_rate: float = 0.5
    target_loss: float | None = None


def read_description(path: str | Path) -> Description:
    """Read and check a file; an error names the place in it, the rule, the value and a way out."""
    file = Path(path)
    try:
        top = Settings(tomllib.loads(file.read_text(encoding="utf-8")), file.name)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no TOML: {error}") from None
    training = top.table("training")
    if training is None:
        raise ValueError(f"{file.name} needs a table [training] with global_batch and rounds, and has none")
    schemes = tuple(choose(entry, file.name) for entry in top.take("policies", list, ["bsp", "lb-bsp"]))
    workers = _workers(top, file.parent)
    described = Description(
        cluster=Cluster(
            workers,
            _network(top.table("network") or Settings({}, f"{file.name}.network")),
            top.take("seed", int, 0),
            top.take("measurement_noise", float, 0.0),
        ),
        global_batch=training.take("global_batch", int),
        rounds=training.take("rounds", int, 300),
        schemes=schemes,
        lead=training.take("lead", int, 0),
        signal_s=training.take("signal_ms", float, 0.0) / 1e3,
        dataset=training.take("dataset", int, None),
        problem=training.choice("problem", PROBLEMS, "none"),
        learning_rate=training.take("learning_rate", float, 0.5),
        target_loss=training.take("target_loss", float, None),
    )
    training.finish()
    top.finish()
    check(described, file.name)
    return described


PROBLEMS = ("none", "digits-softmax", "digits-network")


def check(described: Description, where: str) -> None:
    """Whether it can be simulated; an error names what cannot, and ``where`` it was described."""
    workers = len(described.cluster.workers)
    if described.global_batch < workers:
        raise ValueError(
            f"{where}.training: global_batch must be at least the number of workers, {workers}, got "
            f"{described.global_batch}; raise it or describe fewer workers"
        )
    if described.rounds < 1:
        raise ValueError(f"{where}.training: rounds must be at least 1, got {described.rounds}")
    if described.lead < 0:
        raise ValueError(f"{where}.training: lead must not be negative, got {described.lead}")
    if described.dataset is not None and described.dataset < 1:
        raise ValueError(f"{where}.training: dataset must be at least 1 sample, got {described.dataset}")
    if not described.learning_rate > 0:
        raise ValueError(f"{where}.training: learning_rate must be positive, got {described.learning_rate}")
    if described.problem == "none" and described.target_loss is not None:
        raise ValueError(f"{where}.training: target_loss needs a problem to train; add problem = 'digits-softmax'")
    for scheme in described.schemes:
        if scheme.make is None:
            continue
        policy = scheme.make()
        try:
            policy.first(workers, described.global_batch)
            mixing_on(described.cluster, policy, scheme.sync)
        except ValueError as error:
            raise ValueError(f"{where}.policies, {scheme.label}: {error}") from None
        endless = described.dataset is None and described.problem == "none"
        if endless and isinstance(policy, SelfAdaptive) and policy.every is None:
            raise ValueError(
                f"{where}.policies, {scheme.label}: it re-allocates after every epoch, and the data have no end; add "
                "dataset = … (samples of an epoch) to [training], or give the policy every = … (rounds)"
            )


def _mapping(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a table of settings, got {entry!r}")
    return entry


def _network(settings: Settings) -> Network:
    kind = settings.choice("kind", ("ring", "server"), "ring")
    bandwidth = settings.take("bandwidth_mbps", float, float("inf")) * _BYTES_PER_MBIT
    network = Network(
        "server" if kind == "server" else "ring",
        latency_s=settings.take("latency_ms", float, 0.0) / 1e3,
        message_bytes=settings.take("message_mb", float, 0.0) * 1e6,
        bandwidth=bandwidth,
        server_bandwidth=settings.take("server_bandwidth_mbps", float, float("inf")) * _BYTES_PER_MBIT,
    )
    settings.finish()
    return network


def _workers(top: Settings, folder: Path) -> tuple[Worker, ...]:
    found: list[Worker] = []
    for number, entry in enumerate(top.take("workers", list)):
        settings = Settings(_mapping(entry, f"{top.where}.workers[{number}]"), f"{top.where}.workers[{number}]")
        count = settings.take("count", int, 1)
        if count < 1:
            raise ValueError(f"{settings.where}: count must be at least 1, got {count}")
        try:
            found += [_worker(settings, folder)] * count
        except ValueError as error:
            raise ValueError(str(error) if settings.where in str(error) else f"{settings.where}: {error}") from None
        settings.finish()
    if not found:
        raise ValueError(f"{top.where} needs at least one [[workers]] table, and has none")
    return tuple(found)


def _worker(settings: Settings, folder: Path) -> Worker:
    speed = settings.take("samples_per_s", float, None)
    slope_ms = settings.take("slope_ms", float, None)
    if (speed is None) == (slope_ms is None):
        raise ValueError("give either samples_per_s (time proportional to the batch) or slope_ms (per sample)")
    if speed is not None and not speed > 0:
        raise ValueError(f"samples_per_s must be positive, got {speed}")
    compute = Compute(
        1.0 / speed if speed is not None else (slope_ms or 0.0) / 1e3,
        settings.take("fixed_ms", float, 0.0) / 1e3,
        settings.take("saturation", int, 1),
        settings.take("memory_limit", int, None),
    )
    own_mbps = settings.take("bandwidth_mbps", float, None)
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
        settings.take("lag_s", float, 0.0),
        settings.take("noise", float, 0.0),
        _availability(settings.table("memory"), folder),
    )
    settings.finish()
    return drivers


def _availability(settings: Settings | None, folder: Path) -> Availability | None:
    if settings is None:
        return None
    if "file" in settings:
        values = _column(settings, folder)
        scale, repeat = settings.take("scale", float, 1.0), settings.take("repeat", bool, True)
        process = Availability.series([scale * v for v in values], settings.take("step_s", float), repeat=repeat)
    else:
        at_s, share = settings.take("at_s", list, [0.0]), settings.take("share", list)
        process = Availability(
            tuple(map(float, at_s)), tuple(map(float, share)), settings.take("period_s", float, None)
        )
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
        most, probability = settings.take("most", float, 2.0), settings.take("probability", float, 1.0)
        made = SlowDown(per, most, probability)  # type: ignore[arg-type]
    elif kind == "jitter":
        made = Jitter(per, settings.take("sigma", float, 0.02))  # type: ignore[arg-type]
    else:
        made = Recorded(per, tuple(_column(settings, folder)))  # type: ignore[arg-type]
    settings.finish()
    return made


def _column(settings: Settings, folder: Path) -> list[float]:
    """The numbers of one column of a CSV file, gzipped or not, those of one series where the file holds several."""
    path, column = folder / settings.take("file", str), settings.take("column", str)
    only, value = settings.take("where", str, None), settings.take("equals", str, None)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for name in filter(None, (column, only)):
        if rows and name not in rows[0]:
            raise ValueError(f"{settings.where}: {path.name} has no column {name!r}; it has {', '.join(rows[0])}")
    numbers = [float(row[column]) for row in rows if only is None or row[only] == value]
    if not numbers:
        raise ValueError(f"{settings.where}: {path.name} has no rows" + (f" where {only} is {value!r}" if only else ""))
    return numbers
