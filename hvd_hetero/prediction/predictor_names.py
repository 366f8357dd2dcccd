"""Predictors by name, so that ``LBBSP(predictor="ema")`` and ``LBBSP(predictor=EMA())`` mean the same.

All classes are listed here without a lazy table: the modules of the heavier ones import their libraries (statsmodels,
torch) where they compute, so importing this package costs numpy and nothing else.
"""

from __future__ import annotations

import difflib
from typing import Any

from hvd_hetero.prediction.base import Predictor
from hvd_hetero.prediction.baselines.arima import ARIMA
from hvd_hetero.prediction.baselines.lstm import LSTM
from hvd_hetero.prediction.baselines.simple_rnn import SimpleRNN
from hvd_hetero.prediction.ema import EMA
from hvd_hetero.prediction.memoryless import Memoryless
from hvd_hetero.prediction.mixture.mixture import Mixture
from hvd_hetero.prediction.mixture.reverting import Reverting
from hvd_hetero.prediction.narx.narx import NARX

PREDICTORS: dict[str, type[Predictor]] = {
    cls.name: cls for cls in (Memoryless, EMA, Reverting, ARIMA, SimpleRNN, LSTM, NARX, Mixture)
}


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
    return PREDICTORS[key](**options)
