"""NARX: the predictor of the LB-BSP paper, its network, where it starts and where it trains."""

from hvd_hetero.prediction.narx.narx import NARX

__all__ = ["NARX"]
