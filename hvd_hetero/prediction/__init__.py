"""Prediction of each rank's speed (samples per second) in the round to come; lb-bsp sections 3.2.1, 4.2 and 5.4."""

from hvd_hetero.prediction.base import Predictor
from hvd_hetero.prediction.ema import EMA
from hvd_hetero.prediction.memoryless import Memoryless
from hvd_hetero.prediction.registry import PREDICTORS, predictor

__all__ = ["EMA", "PREDICTORS", "Memoryless", "Predictor", "predictor"]
