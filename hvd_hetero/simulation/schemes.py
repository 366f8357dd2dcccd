"""Which schemes can be asked for by name: production's policies, with whom they average, and what needs a server."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvd_hetero.policies import (
    BSP,
    LBBSP,
    ElasticBSP,
    NonBlocking,
    Policy,
    SelfAdaptive,
    StaticAllocation,
)
from hvd_hetero.simulation.best import BestSplit
from hvd_hetero.simulation.server import Scheme
from hvd_hetero.simulation.strict import Settings
from hvd_hetero.synchronisation import ALLREDUCE, MIXING_NAMES

__all__ = ["SchemeChoice", "choose", "choose_all"]

_POLICIES: dict[str, type[Policy]] = {
    cls.name: cls for cls in (BSP, LBBSP, StaticAllocation, SelfAdaptive, NonBlocking, ElasticBSP)
} | {"best-split": BestSplit}
_SERVER = ("asp", "ssp", "dyn-ssp")
_STALENESS = 3.0  # iterations, as in elastic-bsp's experiments; lb-bsp uses 10


@dataclass(frozen=True, slots=True)
class SchemeChoice:
    """A scheme to simulate. A policy serves one training, so it is made anew each time."""

    label: str
    make: Callable[[], Policy] | None
    """None where it needs a server"""
    server: Scheme | None = None
    sync: str = ALLREDUCE
    """whom each worker averages with, as production calls it (``hvd_hetero.synchronisation``)"""


def choose_all(text: str, where: str) -> tuple[SchemeChoice, ...]:
    """Names separated by commas, or a list in the form that a description has."""
    if not text.lstrip().startswith("["):
        return tuple(choose(name, where) for name in map(str.strip, text.split(",")) if name)
    try:
        entries = tomllib.loads(f"policies = {text}")["policies"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(
            f"{where} is no list of TOML: {error}; write names separated by commas, or as in "
            '["bsp", { name = "lb-bsp", predictor = "narx" }]'
        ) from None
    return tuple(choose(entry, where) for entry in entries)


def choose(entry: Any, where: str) -> SchemeChoice:
    """A scheme from its name, or from a table with its name and options.

    "d-psgd" and "matcha" are BSP with that ``sync``; any other policy takes ``sync`` as an option.
    """
    settings = Settings({"name": entry} if isinstance(entry, str) else _table(entry, where), f"{where}.policies")
    name = settings.choice("name", [*_POLICIES, *MIXING_NAMES, *_SERVER])
    label = settings.take("label", str, "")
    if name in _SERVER:
        return _with_server(name, label, settings.rest(), f"{where}.policies, {name}")
    mixes = name in MIXING_NAMES
    sync = name if mixes else settings.choice("sync", [ALLREDUCE, *MIXING_NAMES], ALLREDUCE)
    options = settings.rest()
    kind = BSP if mixes else _POLICIES[name]
    parameters = [p for p in inspect.signature(kind.__init__).parameters if p != "self"]
    known = [] if kind.__init__ is object.__init__ else parameters
    _refuse_unknown(options, known if mixes else [*known, "sync"], f"{where}.policies, {name}")

    def make() -> Policy:
        return kind(**options)

    try:
        make()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}.policies, {name}: {error}") from None
    shown = [name, *([sync] if sync not in (name, ALLREDUCE) else []), *map(str, options.values())]
    return SchemeChoice(label or " ".join(shown), make, sync=sync)


def _with_server(name: str, label: str, options: dict[str, Any], where: str) -> SchemeChoice:
    allowed = {} if name == "asp" else {"bound": float(options.pop("bound", _STALENESS))}
    _refuse_unknown(options, list(allowed), where)
    scheme = Scheme(name, **allowed)  # type: ignore[arg-type]
    return SchemeChoice(label or name + (f" {scheme.bound:g}" if allowed else ""), None, scheme)


def _table(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(
            f'{where}: policies must hold names or tables with a name, got {entry!r}; write "lb-bsp" or '
            '{ name = "lb-bsp", predictor = "narx" }'
        )
    return entry


def _refuse_unknown(options: dict[str, Any], known: list[str], where: str) -> None:
    settings = Settings(options, where)
    settings.know(*known)
    settings.finish()
