"""What can be simulated by name: production's policies and mixings, and the best possible split."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hvd_hetero.policies import BSP, Policy
from hvd_hetero.policies.policy_names import POLICY_NAMES, policy_class
from hvd_hetero.tools.simulation.best import BestSplit
from hvd_hetero.tools.simulation.settings import Setting, read, shown
from hvd_hetero.topology.mixing import ALLREDUCE, MIXING_NAMES

_BEST_SPLIT = "best-split"
# A longer label would push the figures off the screen.
_LABEL_LETTERS = 60


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy to simulate. A policy serves one training, so it is made again each time."""

    label: str
    make: Callable[[], Policy]
    sync: str = ALLREDUCE
    """Name of the mixing, as production calls it (``hvd_hetero.topology.mixing``)."""
    usable: bool = True
    """True if production has it, too."""


def choose_all(text: str, where: str) -> tuple[PolicyChoice, ...]:
    """Return the policies of a text: names separated by commas, or a list as a description has it."""
    if not text.lstrip().startswith("["):
        names = [name for name in map(str.strip, text.split(",")) if name]
        if not names:
            raise ValueError(f"{where} must name at least one policy, got {shown(text)}; write {where} bsp,lb-bsp")
        return tuple(choose(name, where) for name in names)
    try:
        entries = tomllib.loads(f"policies = {text}")["policies"]
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where} is no list of TOML: {error}; write names separated by commas, or as in "
            '["bsp", { name = "lb-bsp", predictor = "narx" }]'
        ) from None
    return tuple(choose(entry, where) for entry in entries)


def choose(entry: Any, where: str) -> PolicyChoice:
    """Return a policy from its name, or from a table with its name and options.

    "d-psgd" and "matcha" are BSP with that ``sync``; any other policy takes ``sync`` as an option.
    """
    if not isinstance(entry, str | dict):
        raise ValueError(
            f'{where}: policies must hold names or tables with a name, got {shown(entry)}; write "lb-bsp" or '
            '{ name = "lb-bsp", predictor = "narx" }'
        )
    table = {"name": entry} if isinstance(entry, str) else entry
    known = [*POLICY_NAMES, _BEST_SPLIT, *MIXING_NAMES]
    settings = {"name": Setting(str, known=known), "label": Setting(str, "")}
    name, label = read(table, settings, f"{where}.policies", more=True).values()
    if label in known or len(label) > _LABEL_LETTERS or not label.isprintable():
        raise ValueError(
            f"{where}.policies, {name}: label must be a printable text of at most {_LABEL_LETTERS} characters that is "
            f"no policy's name, got {shown(label)}; give another, or none"
        )
    sync = name
    if not (mixes := name in MIXING_NAMES):
        settings["sync"] = Setting(str, ALLREDUCE, known=[ALLREDUCE, *MIXING_NAMES])
        sync = read(table, settings, f"{where}.policies", more=True)["sync"]
    options = {key: value for key, value in table.items() if key not in settings}
    kind: type[Policy] = BSP if mixes else BestSplit if name == _BEST_SPLIT else policy_class(name)
    takes = {} if kind.__init__ is object.__init__ else dict(inspect.signature(kind).parameters)
    read(options, dict.fromkeys(takes, Setting(object, None)), f"{where}.policies, {name}")
    for needed in (p.name for p in takes.values() if p.default is p.empty and p.name not in options):
        written = f'{{ name = "{name}", {needed} = … }}'
        raise ValueError(f"{where}: {name} needs {needed}, and has none; write [{written}]")
    make = partial(kind, **options)
    try:
        make()
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}.policies, {name}: {error}") from None
    words = [name, *([sync] if sync not in (name, ALLREDUCE) else []), *map(str, options.values())]
    label = label or " ".join(words)[:_LABEL_LETTERS]
    return PolicyChoice(label, make, sync=sync, usable=kind is not BestSplit)
