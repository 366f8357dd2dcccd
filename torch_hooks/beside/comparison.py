"""What travels between ranks beside a reducer: a late table, which no rank waits for."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import torch

from hvd_hetero.balancer import Balancer
from hvd_hetero.communication.wire import Handle
from hvd_hetero.errors import RoundStateError
from hvd_hetero.late_tables import LateTables
from hvd_hetero.measurement.gradient_noise import ROUNDING
from torch_hooks.beside.local_squares import Noise
from torch_hooks.beside.trained import Trained
from torch_hooks.wires.choice import TorchWire

logger = logging.getLogger(__name__)

_SOON_S, _LOOKS_S = 5.0, 0.005  # a rank that has failed is not waited for any longer (arbitrary)
_PATIENCE = 32  # tables in which no noise is known
_NO_NOISE = (
    "global_batch=Goodput(…) could not measure the noise of gradients. Call optimizer.zero_grad() in each round beside "
    "DistributedDataParallel, or use torch_hooks.DistributedOptimizer without another reducer"
)


class Comparison:
    """The rows of one rank, and what it hears of the others'."""

    def __init__(self, balancer: Balancer, wire: TorchWire, prefix: str, trained: Trained, noise: Noise) -> None:
        self._balancer, self._wire = balancer, wire
        self._name = f"{prefix}.table"
        self._trained, self._noise = trained, noise
        self._tables = LateTables(balancer)
        self._under_way: tuple[Handle, Any] | None = None
        self._broken = False

    def look(self, loss: torch.Tensor) -> None:
        """Note whether a loss is finite. Not on an accelerator, for which the host would have to wait."""
        if loss.device.type == "cpu":
            self._broken |= not math.isfinite(loss.item())

    def close_round(self) -> None:
        """Close the round at hand, where this rank is done: hear of former ones, and send a row if it is due."""
        self._tables.close_round()
        self._hear()
        self._trained.close_round()
        if self._tables.due:
            self._send()

    def settle(self) -> None:
        """Compare all finished rounds, where all ranks have come to the end of an iteration; a collective call."""
        self._hear()
        if self._tables.untold:
            self._send()
            self._hear()

    def finish(self) -> None:
        """Compare all finished rounds after the last one, if all ranks come here: one that has failed may not."""
        while self._under_way is not None or self._tables.untold:
            if self._under_way is None:
                try:
                    self._send()
                except (RuntimeError, ValueError, RoundStateError) as reason:  # of a wire that was shut down
                    logger.warning("the last rounds were not compared (%s); call close() before ranks part", reason)
                    return
            if not self._comes():
                return
            self._hear()

    def _comes(self) -> bool:
        """Return whether the table that is on its way comes soon."""
        assert self._under_way is not None, "it was sent"
        until = time.monotonic() + _SOON_S
        while not self._wire.done(self._under_way[0]):
            if time.monotonic() > until:
                logger.warning(
                    "the last rounds were not compared, for not all ranks came to close() within %g s; let all leave "
                    "the loop in the same round, and call close()", _SOON_S
                )  # fmt: skip
                return False
            time.sleep(_LOOKS_S)
        return True

    def _send(self) -> None:
        figures = self._trained.figures(self._tables.sent) | self._noise.figures()
        row = self._tables.row(broken=float(self._broken), **figures)
        self._broken = False
        self._under_way = self._wire.start_sum(torch.from_numpy(row), self._name), row

    def _hear(self) -> None:
        if self._under_way is not None:
            (handle, row), self._under_way = self._under_way, None
            self._wire.wait(handle)
            self._tables.hear(row)
            self._require_noise()

    def _require_noise(self) -> None:
        """Raise on all ranks, where the batch goes by the noise, if it cannot be measured."""
        finished = self._balancer.finished
        if self._balancer.planner.goodput is None or self._wire.size == 1 or finished is None:
            return
        # Another rank's mean is another one: somebody reduces gradients later.
        apart = finished.table.disagreement("mean_square", ROUNDING)
        if apart or (self._tables.sent == _PATIENCE and math.isnan(finished.noise_scale)):
            raise ValueError(_NO_NOISE)
