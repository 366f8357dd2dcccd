"""Where NARX starts: the parameters shipped with the package, a former run's, or none."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from importlib import resources
from typing import Any, cast

from hvd_hetero.prediction.narx import neural_network

NAME, VERSION = "narx", 2  # of the state that parameters are taken from


@functools.cache
def shipped() -> Mapping[str, Any]:
    """Return the parameters that come with the package, and what they were trained on."""
    text = resources.files("hvd_hetero.prediction.narx").joinpath("warm.json").read_text(encoding="utf-8")
    return cast(Mapping[str, Any], json.loads(text))


def start_of(warm_start: str | Mapping[str, Any] | None) -> tuple[float, ...] | None:
    """Return the parameters to begin with; None from scratch."""
    if warm_start is None:
        return None
    state = shipped() if warm_start == "shipped" else warm_start
    if isinstance(state, str):
        raise ValueError(f'warm_start: must be "shipped", None or a state of NARX, got {state!r}')
    if (named := (state.get("predictor"), state.get("version"))) != (NAME, VERSION):
        raise ValueError(
            f"warm_start: must be the state of a narx predictor, version {VERSION}, got {named}; give what "
            "state_dict() of one has returned"
        )
    return checked(state["parameters"])


def checked(values: Any) -> tuple[float, ...] | None:
    """Return parameters from plain data; None stays None."""
    if values is None:
        return None
    numbers = tuple(float(x) for x in values)
    if len(numbers) != neural_network.PARAMETERS or not all(map(math.isfinite, numbers)):
        raise ValueError(f"parameters: NARX has {neural_network.PARAMETERS} finite ones, got {values!r}")
    return numbers
