"""A long short-term memory with look-back 2, a baseline (lb-bsp sections 3.2.1 and 5.4); see `recurrent`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_hetero.prediction.baselines.recurrent import Recurrent

if TYPE_CHECKING:
    import torch


class LSTM(Recurrent):
    """Predict by an LSTM over the last two speeds; needs torch."""

    name = "lstm"

    @staticmethod
    def _cell(hidden: int) -> torch.nn.RNNBase:
        import torch

        return torch.nn.LSTM(1, hidden, batch_first=True)
