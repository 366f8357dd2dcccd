"""The base of all ways to average: it carries the gradients of a round to the other ranks."""

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
from torch_hooks.gradients.arrangement import Arrangement
from torch_hooks.gradients.parameter_norm import ParameterNorm
from torch_hooks.wires.choice import TorchWire

__all__ = ["Synchroniser", "Trained"]

_IN_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True, slots=True)
class Trained:
    """One optimizer that a synchroniser works on, and how its ranks reach one another."""

    balancer: Balancer
    optimizer: torch.optim.Optimizer
    names: dict[torch.Tensor, str]
    """The parameters, in the same order on every rank."""
    prefix: str
    wire: TorchWire
    arrangements: list[Arrangement]
    """The buckets of all optimizers of the loop; a synchroniser that has buckets adds its own."""


class Synchroniser(ABC):
    """Turns one round's gradients of this rank into what its update needs; the table rides along.

    Call ``arrived`` for each gradient of the last micro-batch, as the backward pass brings it; then ``finish``.
    """

    overlaps: ClassVar[bool] = True
    """True: gradients are sent as they arise, so they must not be touched before ``finish``."""

    keeps_ranks_alike: ClassVar[bool] = False
    """True: all ranks hold the same gradients after ``finish``, and so the same parameters after each round."""

    updates_locally: ClassVar[bool] = False
    """True: each micro-batch is a separate step, and the round ends with what follows the last step."""

    def __init__(self, trained: Trained) -> None:
        self._balancer = trained.balancer
        self._optimizer = trained.optimizer
        self._names = trained.names
        self._prefix = trained.prefix
        self._wire = trained.wire
        self._table_wire = trained.wire
        self._table: tuple[Handle, npt.NDArray[Any]] | None = None
        self._table_type = torch.float64 if all(p.dtype == torch.float64 for p in self._names) else torch.float32
        self._norm: ParameterNorm | None = None
        self._shown = 0.0, 0.0
        """Witness and bits of the next round, taken while this rank waited in the last one."""
        self._broken = False
        """True: NaN or an infinity is in what has left of this round's gradient."""
        self.rearranged = False
        """True: parameters may be trained now that were not before."""
        self.scale = 0.0
        """Logarithm of the factor that scales the gradients, which must be the same on every rank."""

    @property
    def under_way(self) -> bool:
        """True if something of this round is on its way."""
        return self._table is not None

    def extend(self, parameters: Iterable[torch.Tensor]) -> None:  # noqa: B027 - most have nothing to note
        """Train these parameters, too; they are in the names already."""

    def note_of(self, parameter: torch.Tensor) -> Any:
        """Return the argument of ``arrived`` for this parameter: found once, not in every round."""
        return parameter

    @abstractmethod
    def arrived(self, note: Any) -> None:
        """Take a parameter's complete gradient."""

    @property
    def gradients_left(self) -> bool:
        """True if something cannot be taken back."""
        return self._table is not None

    def forget(self) -> None:  # noqa: B027 - most have nothing to forget
        """Forget the round, of which nothing has left."""

    def release(self) -> None:  # noqa: B027 - most have none
        """Let go of memory that is kept from round to round; nothing has left."""

    def set_aside(self) -> Iterable[torch.Tensor]:
        """Return parameters whose gradients have left, which ``finish`` gives back: the micro-batch is done again."""
        return ()

    @abstractmethod
    def finish(self) -> None:
        """Send what is not on its way, wait, and agree; everything is computed."""

    def _trained(self) -> int:
        """Return a checksum of which parameters are trained, if ranks would wait for each other's gradients."""
        return 0

    def _row(self) -> torch.Tensor:
        """Return this rank's part of the table, now that its last gradient is there."""
        # After local steps, of which ranks do different numbers, a schedule per step has come to different places.
        settings = 0.0 if self.updates_locally else settings_of(self._optimizer.param_groups) + self.scale
        witness, bits = self._shown
        report = self._balancer.report(
            settings=settings, witness=witness, bits=bits, broken=self._broken, trained=self._trained(),
            dtype=_IN_NUMPY[self._table_type],
        )  # fmt: skip
        return torch.from_numpy(report)

    def _post_table(self) -> None:
        """Send the table by itself, in a separate collective."""
        row = self._row()
        self._table = self._table_wire.start_sum(row, f"{self._prefix}.table"), row.numpy()

    def _await_table(self, imminent: Callable[[], bool] | None = None) -> None:
        """Wait for the table; ``imminent`` returns whether it is near."""
        assert self._table is not None
        expected_s, transfer_s = self._balancer.waiting()
        if self._norm is not None:
            self._shown = self._norm.at(self._balancer.rounds + 1)
        self._table_wire.wait(self._table[0], expected_s, transfer_s, imminent)
        self._balancer.hear(self._table[1])

    def _agree(self) -> float:
        self._table = None
        return self._balancer.agree()
