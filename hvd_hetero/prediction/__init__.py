"""Prediction of each rank's speed (samples per second) in the round to come; lb-bsp sections 3.2.1, 4.2 and 5.4."""

from typing import TYPE_CHECKING

from hvd_hetero.lazy import lazily

if TYPE_CHECKING:
    from hvd_hetero.prediction.base import Predictor
    from hvd_hetero.prediction.baselines.arima import ARIMA
    from hvd_hetero.prediction.baselines.recurrent import LSTM, SimpleRNN
    from hvd_hetero.prediction.ema import EMA
    from hvd_hetero.prediction.memoryless import Memoryless
    from hvd_hetero.prediction.mixture import Mixture
    from hvd_hetero.prediction.narx.narx import NARX
    from hvd_hetero.prediction.predictor_names import PREDICTORS, predictor
    from hvd_hetero.prediction.reverting import Reverting

__all__ = [
    "ARIMA",
    "EMA",
    "LSTM",
    "NARX",
    "PREDICTORS",
    "Memoryless",
    "Mixture",
    "Predictor",
    "Reverting",
    "SimpleRNN",
    "predictor",
]

__getattr__ = lazily(__name__)
