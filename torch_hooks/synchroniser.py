"""What carries the gradients of a round to the other ranks: one base, and the allreduce that most policies use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import horovod.torch as hvd
import torch

from hvd_hetero.balancer import Balancer
from hvd_hetero.errors import RoundStateError
from hvd_hetero.settings import settings_of
from torch_hooks.compression import Compressed
from torch_hooks.parameters import witness_among
from torch_hooks.sparse import Gather, Layouts
from torch_hooks.waiting import wait

__all__ = ["Allreduce", "Synchroniser"]

_CHANGED = (
    "was changed between backward() and step(), while it was on its way to the other ranks. Clip or unscale in "
    "optimizer.register_step_pre_hook(…), or write: if optimizer.synchronize(): clip; with "
    "optimizer.skip_synchronize(): optimizer.step()"
)


class Synchroniser(ABC):
    """Turns one round's gradients of this rank into what its update needs; the table rides along.

    ``arrived`` for each gradient of the last micro-batch, as the backward pass brings it; then ``finish``. Parameters
    are the keys of ``names``, in the same order on every rank.
    """

    overlaps: ClassVar[bool] = True
    """whether gradients leave as they arise, so that they must not be touched before ``finish``"""

    updates_locally: ClassVar[bool] = False
    """whether each micro-batch is a step of its own, and the round ends with what follows the last step"""

    def __init__(
        self, balancer: Balancer, optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], prefix: str
    ) -> None:
        self._balancer = balancer
        self._optimizer = optimizer
        self._names = names
        self._prefix = prefix
        self._table: tuple[int, torch.Tensor] | None = None
        self._table_dtype = torch.float64 if all(p.dtype == torch.float64 for p in names) else torch.float32
        self._witness: torch.Tensor | None = None
        self.scale = 0.0
        """logarithm of what the gradients are scaled by, which must be the same on every rank"""

    @property
    def under_way(self) -> bool:
        """Whether something of this round is on its way."""
        return self._table is not None

    def extend(self, parameters: Iterable[torch.Tensor]) -> None:  # noqa: B027 - most have nothing to note
        """These parameters are trained, too; they are in the names already."""

    @abstractmethod
    def arrived(self, parameter: torch.Tensor) -> None:
        """The gradient of this parameter is complete."""

    def set_aside(self) -> Iterable[torch.Tensor]:
        """The micro-batch is done again: the parameters whose gradients have left, which ``finish`` gives back."""
        return ()

    @abstractmethod
    def finish(self) -> None:
        """Everything is computed: exchange what is not on its way, wait, agree."""

    def _post_table(self) -> None:
        witness = 0.0 if self._witness is None else float(torch.linalg.vector_norm(self._witness.detach()))
        report = self._balancer.report(settings=settings_of(self._optimizer.param_groups) + self.scale, witness=witness)
        vector = torch.from_numpy(report).to(self._table_dtype)
        self._table = hvd.allreduce_async_(vector, name=f"{self._prefix}.table", op=hvd.Sum), vector

    def _await_table(self) -> None:
        assert self._table is not None
        wait(self._table[0], *self._balancer.waiting())

    def _agree(self) -> float:
        assert self._table is not None
        _, vector = self._table
        self._table = None
        return self._balancer.agree(vector.numpy())


class Allreduce(Synchroniser):
    """The mean gradient over all samples of the round, on every rank.

    In the last backward pass every gradient goes on the wire as soon as it is there, with ``op=Sum`` and its weight
    already applied: factors handed to Horovod would have to be equal on all ranks. The rank's row of the table goes out
    just before the last gradient and is fused with it.

    ``compression`` is Horovod's (``compress`` and ``decompress``), applied to the weighted gradient; the table is never
    compressed. Sparse gradients travel as rows (``torch_hooks.sparse``), unless ``sparse_as_dense``.
    """

    def __init__(
        self,
        balancer: Balancer,
        optimizer: torch.optim.Optimizer,
        names: dict[torch.Tensor, str],
        prefix: str,
        *,
        compression: Any = None,
        sparse_as_dense: bool = False,
    ) -> None:
        super().__init__(balancer, optimizer, names, prefix)
        self._witness = witness_among(names)
        # Per gradient on its way: the handle, the gradient, and the version it had, which tells a change by the user.
        self._handles: dict[torch.Tensor, tuple[Any, torch.Tensor, int]] = {}
        self._aside: list[torch.Tensor] = []
        self._expected = sum(p.requires_grad for p in names)
        self._compression = compression
        self._layouts = Layouts(names, prefix, optimizer, as_dense=sparse_as_dense)

    @property
    def under_way(self) -> bool:
        """Whether gradients are on their way."""
        return bool(self._handles) or self._table is not None

    def extend(self, parameters: Iterable[torch.Tensor]) -> None:
        """These are trained, too."""
        self._layouts.extend(parameters)

    def arrived(self, parameter: torch.Tensor) -> None:
        """Send it."""
        if parameter in self._handles:
            raise RoundStateError(
                f"the gradient of {self._names[parameter]!r} was computed twice before step(), and the first one is on "
                "its way already; add the losses and call backward() once per micro-batch"
            )
        if len(self._handles) + 1 == self._expected:
            self._post_table()
        self._send(parameter)

    def set_aside(self) -> Iterable[torch.Tensor]:
        """Those on their way: they are gradients of the whole micro-batch, and need not be computed again."""
        self._aside = list(self._handles)
        return self._aside

    def finish(self) -> None:
        """Wait for the sums, once zeros are sent for gradients that did not arise here: another rank may have them."""
        for parameter in self._aside:
            parameter.grad = self._handles[parameter][1]
        self._aside.clear()
        if self._handles:
            self._expected = len(self._handles)  # gradients that arise by themselves, likely the same next time
        self._layouts.agree()
        for parameter in self._names:
            if parameter.requires_grad and parameter not in self._handles:
                if parameter.grad is None:
                    parameter.grad = self._layouts.nothing(parameter)
                self._send(parameter)
        if self._table is None:
            self._post_table()
        self._await_table()
        changed = None
        gradients: list[torch.Tensor] = []
        for parameter, (handle, gradient, version) in self._handles.items():
            if parameter.grad is not gradient or gradient._version != version:
                changed = parameter
            if type(handle) is int:
                hvd.synchronize(handle)
                gradients.append(gradient)
            else:
                gradients.append(handle.result())
                parameter.grad = gradients[-1]
        self._handles.clear()
        correction = self._agree()
        if changed is not None:
            raise RoundStateError(f"the gradient of {self._names[changed]!r} {_CHANGED}")
        if correction != 1.0:
            torch._foreach_mul_(gradients, correction)
        self._layouts.back_to_rows()

    def _send(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        name = f"{self._prefix}.{self._names[parameter]}"
        if self._layouts.as_rows(parameter, gradient):
            gradient = parameter.grad = self._layouts.rows(parameter, gradient)
            gather = Gather(gradient, self._balancer.weight, name, self._compression)
            self._handles[parameter] = gather, gradient, gradient._version
            return
        if gradient.layout is not torch.strided:
            gradient = parameter.grad = gradient.to_dense()
        elif not gradient.is_contiguous():
            gradient = parameter.grad = gradient.contiguous()
        elif _shares_memory(gradient):
            gradient = parameter.grad = gradient.clone()
        weight = self._balancer.weight
        if weight == 0.0:
            gradient.zero_()  # and not a product, which would keep the NaN of a mean over no samples
        elif weight != 1.0:
            gradient.mul_(weight)
        handle: Any
        if self._compression is None:
            handle = hvd.allreduce_async_(gradient, name=name, op=hvd.Sum)
        else:
            handle = Compressed(gradient, name, self._compression)
        self._handles[parameter] = handle, gradient, gradient._version


def _shares_memory(gradient: torch.Tensor) -> bool:
    """Whether the numbers are not the gradient's alone, so that they must not be changed in place.

    A part of a larger tensor, as torch.cat of parameters leaves it, has a version that counts changes of all parts.
    And of ``x + bias.view(1, -1)`` with a single sample in x, the gradient of the bias is a view of the gradient of the
    sum, which the backward pass is still to use.
    """
    storage = gradient.untyped_storage()
    return storage.nbytes() > gradient.nbytes or _users(storage._cdata) > _OWN_USERS


# Not public, and without a public counterpart: how many tensors and Python objects use a storage.
_users: Callable[[int], int] = torch._C._storage_Use_Count
_OWN_USERS = 2  # the gradient, and the Python object by which we ask
