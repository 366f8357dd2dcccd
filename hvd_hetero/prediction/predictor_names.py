"""Predictors by name, so that ``LBBSP(predictor="ema")`` and ``LBBSP(predictor=EMA())`` mean the same.

Only the one that is asked for is imported.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from hvd_hetero.prediction.base import Predictor

PREDICTORS = {
    "memoryless": "Memoryless",
    "ema": "EMA",
    "reverting": "Reverting",
    "arima": "ARIMA",
    "simple_rnn": "SimpleRNN",
    "lstm": "LSTM",
    "narx": "NARX",
    "mixture": "Mixture",
}
"""The class of each name, in ``hvd_hetero.prediction``."""


def predictor(which: str | Predictor | type[Predictor], **options: Any) -> Predictor:
    """Return a predictor from its name (``options`` go to its constructor), its class, or itself.

    An object is returned as it is: give each rank its own, since it holds that rank's history.
    """
    if isinstance(which, Predictor):
        if options:
            raise TypeError(f"options {sorted(options)} cannot be applied to a finished {type(which).__name__} object")
        return which
    if isinstance(which, type) and issubclass(which, Predictor):
        return which(**options)
    if not isinstance(which, str):
        raise TypeError(f"predictor: must be a name, a Predictor or a subclass of it, got {which!r}")
    key = which.strip().lower().replace("-", "_")
    if key not in PREDICTORS:
        near = difflib.get_close_matches(key, PREDICTORS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"predictor: no predictor is called {which!r}; {hint}known are {', '.join(sorted(PREDICTORS))}"
        )
    named: type[Predictor] = getattr(importlib.import_module(__package__), PREDICTORS[key])
    return named(**options)
