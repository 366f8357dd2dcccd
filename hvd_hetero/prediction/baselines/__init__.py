"""The predictors that the papers compare with."""

from hvd_hetero.prediction.baselines.arima import ARIMA
from hvd_hetero.prediction.baselines.lstm import LSTM
from hvd_hetero.prediction.baselines.simple_rnn import SimpleRNN

__all__ = ["ARIMA", "LSTM", "SimpleRNN"]
