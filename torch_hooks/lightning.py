"""Lightning's Trainer with unequal batches, under DDP or FSDP2.

    balance = LoadBalance(global_batch=512)
    trainer = Trainer(strategy="ddp", callbacks=[ScaleLoss(balance)], …)
    trainer.fit(module, BalancedLoader(dataset, balance, shuffle=True))

The module stays as it is, and logs its own loss.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_hetero.errors import RoundStateError
from hvd_hetero.session import balancer_of
from torch_hooks.load_balance import LoadBalance
from torch_hooks.loader import BalancedLoader

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback


class ScaleLoss(Callback):  # type: ignore[misc]
    """Weigh each batch's gradient by its share of the round.

    ``accumulate_grad_batches`` is the loader's ``micro_batches``. The loss is the mean over the samples of a batch.
    """

    def __init__(self, balance: LoadBalance) -> None:
        if balancer_of(balance).planner.goodput is not None:
            raise ValueError(
                "global_batch=Goodput(…) changes the steps of an epoch, whose number Lightning fixes when fit "
                "begins; give a global_batch that stays"
            )
        self._balance = balance

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Weigh the gradient of this loss, which Lightning has divided by ``accumulate_grad_batches``."""
        session, divided_by = self._balance._session, trainer.accumulate_grad_batches
        if session.beside is None:
            raise RoundStateError(
                "ScaleLoss is for batches of a BalancedLoader beside another reducer, such as strategy='ddp'; with "
                "a DistributedOptimizer leave it out"
            )
        planned = max(session.balancer.work.plan.micro_batches)
        if planned != divided_by:
            raise ValueError(
                "accumulate_grad_batches must be the micro-batches of a round, since Lightning divides each loss by "
                f"it; got {divided_by} and {planned}. Write BalancedLoader(…, micro_batches={divided_by})"
            )
        session.beside.weigh(loss, divided_by)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Give loaders of streams a length: else Lightning would draw each batch before it has used the last."""
        if trainer.max_steps > 0:
            self._balance._session.batches_at_most = trainer.max_steps * trainer.accumulate_grad_batches

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse loaders whose batches Lightning would draw too early, or count otherwise."""
        loader = trainer.train_dataloader
        if isinstance(loader, BalancedLoader) and loader.cuts_by_cost:
            raise ValueError(
                "max_micro_batch_cost does not go with Lightning, which accumulates the same number of batches in each "
                "step; raise micro_batches and accumulate_grad_batches instead"
            )
        if isinstance(loader, BalancedLoader) and not loader.sized:
            raise ValueError(
                "the loader's stream has no __len__, so Lightning would draw each batch before it has used the last; "
                "give Trainer(max_steps=…), a stream with __len__, or rounds_per_epoch"
            )
