"""Lightning's Trainer with unequal batches, under DDP or FSDP2.

    balance = LoadBalance(global_batch=512)
    trainer = Trainer(strategy="ddp", callbacks=[ScaleLoss(balance)], …)
    trainer.fit(module, BalancedLoader(dataset, balance, shuffle=True))

The module stays as it is, and logs its own loss.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_hooks.load_balance import LoadBalance

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

__all__ = ["ScaleLoss"]


class ScaleLoss(Callback):  # type: ignore[misc]
    """Weigh each batch's gradient by its share of the round.

    ``accumulate_grad_batches`` is the loader's ``micro_batches``. The loss is the mean over the samples of a batch.
    """

    def __init__(self, balance: LoadBalance) -> None:
        self._balance = balance

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Weigh the gradient of this loss, which Lightning has divided by ``accumulate_grad_batches``."""
        self._balance._rounds_beside().weigh(loss, trainer.accumulate_grad_batches)
