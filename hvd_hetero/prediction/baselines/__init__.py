"""The predictors that the papers compare with."""

from hvd_hetero.prediction.baselines.arima import ARIMA
from hvd_hetero.prediction.baselines.recurrent import LSTM, SimpleRNN

__all__ = ["ARIMA", "LSTM", "SimpleRNN"]
