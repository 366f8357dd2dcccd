"""A plain recurrent network with look-back 2, a baseline (lb-bsp sections 3.2.1 and 5.4); see `recurrent`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_hetero.prediction.baselines.recurrent import Recurrent

if TYPE_CHECKING:
    import torch


class SimpleRNN(Recurrent):
    """Predict by an Elman network over the last two speeds; needs torch."""

    name = "simple_rnn"

    @staticmethod
    def _cell(hidden: int) -> torch.nn.RNNBase:
        import torch

        return torch.nn.RNN(1, hidden, batch_first=True)
