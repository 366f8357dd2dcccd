"""The base of all ways to average gradients or parameters over the ranks, at the end of a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from hvd_hetero.balancer import Balancer
from hvd_hetero.communication.wire import Handle
from hvd_hetero.consistency import settings_of
from torch_hooks.gradients.parameter_norm import ParameterNorm
from torch_hooks.wires.choice import TorchWire

_IN_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True, slots=True)
class SynchronisedOptimizer:
    """One optimizer that a synchroniser works on, and how its ranks reach one another."""

    balancer: Balancer
    optimizer: torch.optim.Optimizer
    names: dict[torch.Tensor, str]
    """The parameters, in the same order on every rank."""
    prefix: str
    wire: TorchWire


class Synchroniser(ABC):
    """Turns one round's gradients of this rank into what its update needs, and exchanges the table with them.

    Nothing of a round is sent before its end. Until then a batch may have several backward passes, and a micro-batch
    can be undone.
    """

    keeps_ranks_alike: ClassVar[bool] = False
    """True: all ranks hold the same gradients after ``finish``, and so the same parameters after each round."""

    updates_locally: ClassVar[bool] = False
    """True: each micro-batch is a separate step, and the round ends with what follows the last step."""

    def __init__(self, trained: SynchronisedOptimizer) -> None:
        self._balancer = trained.balancer
        self._optimizer = trained.optimizer
        self._names = trained.names
        self._prefix = trained.prefix
        self._wire = trained.wire
        self._table: tuple[Handle, npt.NDArray[Any]] | None = None
        self._table_type = torch.float64 if all(p.dtype == torch.float64 for p in self._names) else torch.float32
        self._norm: ParameterNorm | None = None
        self._shown = 0.0, 0.0
        """Norm and checksum for the next round's row, computed while this rank waited in the last one."""
        self._broken = False
        """True: NaN or an infinity is in this round's gradient."""
        self.thawed = False
        """True: parameters may be trained now that were not before."""
        self.scale = 0.0
        """Logarithm of the gradient scaler's factor, which must be the same on every rank."""

    def extend(self, parameters: Iterable[torch.Tensor]) -> None:  # noqa: B027 - most have nothing to note
        """Synchronise these parameters, too; they are in the names already."""

    @abstractmethod
    def finish(self) -> None:
        """Send what the round has gathered, wait, and agree."""

    def _trained(self) -> int:
        """Return a checksum of which parameters are trained, if ranks would wait for each other's gradients."""
        return 0

    def _squares_before(self) -> tuple[float, float, float]:
        """Return the squares measured in an earlier round: see ``Balancer.report``."""
        return 0.0, 0.0, 0.0

    def _row(self) -> torch.Tensor:
        """Return this rank's part of the table, now that its last gradient is there."""
        # After local steps, of which ranks do different numbers, a schedule per step has come to different places.
        settings = 0.0 if self.updates_locally else settings_of(self._optimizer.param_groups) + self.scale
        parameter_norm, bits = self._shown
        report = self._balancer.report(
            settings=settings, parameter_norm=parameter_norm, bits=bits, broken=self._broken, trained=self._trained(),
            squares=self._squares_before(), dtype=_IN_NUMPY[self._table_type],
        )  # fmt: skip
        return torch.from_numpy(report)

    def _post_table(self) -> None:
        """Send the table by itself, in a separate collective."""
        row = self._row()
        self._table = self._wire.start_sum(row, f"{self._prefix}.table"), row.numpy()

    def _await_table(self, imminent: Callable[[], bool] | None = None) -> None:
        """Wait for the table; ``imminent`` returns whether it is near."""
        assert self._table is not None
        expected_s, transfer_s = self._balancer.waiting()
        if self._norm is not None:
            # Other ranks still compute, so this delays no one.
            self._shown = self._norm.at(self._balancer.rounds + 1)
        (handle, table), self._table = self._table, None
        self._wire.wait(handle, expected_s, transfer_s, imminent)
        self._balancer.receive_table(table)
