"""The late table that ranks exchange beside a reducer, and that no rank waits for."""

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
from hvd_hetero.measurement.gradient_noise import SUM_ROUNDING
from torch_hooks.beside.local_squares import Noise
from torch_hooks.beside.stepping_optimizers import SteppingOptimizers
from torch_hooks.wires.choice import TorchWire

logger = logging.getLogger(__name__)

_CLOSE_WAITS_S = 5.0  # for the last table: a rank that has failed never comes (arbitrary)
_TABLES_UNTIL_NOISE = 32  # a loop whose noise is still unknown then hides it in every round (arbitrary)
_NO_NOISE = (
    "global_batch=Goodput(…) could not measure the noise of gradients. Call optimizer.zero_grad() in each round beside "
    "DistributedDataParallel, or use torch_hooks.DistributedOptimizer without another reducer"
)


class Comparison:
    """Sends this rank's rows of the late table, and receives the rows of all ranks."""

    def __init__(
        self, balancer: Balancer, wire: TorchWire, prefix: str, trained: SteppingOptimizers, noise: Noise
    ) -> None:
        self._balancer, self._wire = balancer, wire
        self._name = f"{prefix}.table"
        self._trained, self._noise = trained, noise
        self._tables = LateTables(balancer)
        self._under_way: tuple[Handle, Any] | None = None
        self._broken = False

    def look(self, loss: torch.Tensor) -> None:
        """Note whether a loss is finite."""
        # The host would have to wait for an accelerator's number.
        if loss.device.type == "cpu":
            self._broken |= not math.isfinite(loss.item())

    def close_round(self) -> None:
        """Close the round that this rank has done: receive the former table, and send a row if one is due."""
        self._tables.close_round()
        self._hear()
        self._trained.close_round()
        if self._tables.due:
            self._send()

    def drain(self) -> None:
        """Compare all finished rounds, where all ranks have come to the end of an iteration; a collective call."""
        self._hear()
        if self._tables.unsent:
            self._send()
            self._hear()

    def finish(self) -> None:
        """Compare all finished rounds after the last one, if all ranks come here: one that has failed may not."""
        while self._under_way is not None or self._tables.unsent:
            if self._under_way is None:
                try:
                    self._send()
                except (RuntimeError, ValueError, RoundStateError) as reason:
                    # Often after destroy_process_group() or hvd.shutdown(): the training is over, and keeps its result.
                    logger.warning(
                        "the last rounds were not compared (%s); call close() while all ranks still run", reason
                    )
                    return
            if not self._comes():
                return
            self._hear()

    def _comes(self) -> bool:
        """Return whether the table that was sent arrives before ``close()`` gives up."""
        assert self._under_way is not None, "it was sent"
        until = time.monotonic() + _CLOSE_WAITS_S
        while not self._wire.done(self._under_way[0]):
            if time.monotonic() > until:
                logger.warning(
                    "the last rounds were not compared, since some rank did not call close() within %g s. Let all "
                    "ranks leave the loop in the same round, and call close()", _CLOSE_WAITS_S
                )  # fmt: skip
                return False
            time.sleep(_CLOSE_WAITS_S / 1000)
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
            self._tables.receive_table(row)
            self._require_noise()

    def _require_noise(self) -> None:
        """Raise on all ranks if the batch adapts to the gradient noise, and the noise cannot be measured."""
        finished = self._balancer.finished
        if self._balancer.planner.goodput is None or self._wire.size == 1 or finished is None:
            return
        # All ranks hold one mean when backward() is over, unless the reducer works later: then none was measured.
        apart = finished.table.disagreement("mean_square", SUM_ROUNDING)
        if apart or (self._tables.sent == _TABLES_UNTIL_NOISE and math.isnan(finished.noise_scale)):
            raise ValueError(_NO_NOISE)
