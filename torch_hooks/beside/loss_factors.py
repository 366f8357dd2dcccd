"""The factor by which each batch's loss is multiplied, beside a reducer (``scaled_rounds``)."""

from __future__ import annotations

import torch

from hvd_hetero.balancer import WEIGHS_NOTHING, Balancer
from hvd_hetero.communication.wire import Handle
from torch_hooks.beside.stepping_optimizers import Reducer
from torch_hooks.wires.choice import TorchWire


class LossFactors:
    """Computes the factors by which this rank's losses are multiplied."""

    def __init__(self, balancer: Balancer, wire: TorchWire, prefix: str, reducer: Reducer) -> None:
        self._balancer, self._wire = balancer, wire
        self._name = f"{prefix}.weight"
        self.divisor = wire.size if reducer == "mean" else 1
        """n of a reducer that takes the mean of n ranks."""
        self._under_way: tuple[Handle, torch.Tensor] | None = None
        self._total = 0.0
        """Sum of all ranks' weights in the round, if weights are not samples."""

    def announce(self, weight: float) -> None:
        """Start the sum of all ranks' weights. ``weight``: the sum of this rank's, before the first loss of a round."""
        total = torch.tensor([weight], dtype=torch.float64)
        # Nobody waits for it here: it travels behind the forward pass, and the first loss is scaled after that.
        self._under_way = self._wire.start_sum(total, self._name), total

    def of_batch(self) -> float:
        """Return the loss factor of the current batch, waiting for the sum of all ranks' weights if it is needed."""
        balancer, work = self._balancer, self._balancer.work
        if self._under_way is not None:
            (handle, total), self._under_way = self._under_way, None
            # All ranks wait for the one that drew its batches last, which is no work of this rank's.
            with balancer.meter.waiting_for_others():
                self._wire.wait(handle)
            self._total = float(total)
            if not self._total:
                raise ValueError(WEIGHS_NOTHING.format(balancer.rounds))
        part = work.samples / work.plan.total if work.weight is None else work.weight / self._total
        return part * self.divisor

    def forget(self) -> None:
        """Forget an unfinished round."""
        self._under_way = None
