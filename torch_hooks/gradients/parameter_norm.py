"""Norms and checksums of pieces of the parameters, which ranks compare (``hvd_hetero.consistency``)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from hvd_hetero.consistency import WatchedParameter, kernels, norm_and_checksum, piece_of
from torch_hooks.gradients.buckets import in_memory

# NumPy has no bfloat16, and a norm in float16 would overflow.
_ACCURATE = (torch.float32, torch.float64)


class ParameterNorm:
    """A rank's figures of its parameters for each round. They are in the same order on every rank."""

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        # An accelerator's are not read, which would wait for the device. They keep their turn, since other ranks may
        # have theirs on the CPU.
        floats = [p for p in names if p.is_floating_point() and p.numel()]
        self._parameters = [weakref.ref(p) for p in floats]
        self.watched = [WatchedParameter(names[p], p.numel(), p.element_size()) for p in floats]

    def at(self, round: int) -> tuple[float, float]:
        """Return norm and checksum of the piece whose turn it is; zeros if there is nothing to compare."""
        if not self._parameters:
            return 0.0, 0.0
        which, part = piece_of(round, self.watched)
        parameter = self._parameters[which]()
        if parameter is None or parameter.device.type != "cpu":
            return 0.0, 0.0
        piece = in_memory(parameter)[part]
        numbers = piece if piece.dtype in _ACCURATE else piece.float()
        return norm_and_checksum(numbers.numpy(), piece.view(torch.uint8).numpy())


def kernels_here() -> float:
    """Return a checksum of all that decides how updates are rounded: only like ranks can be compared to the bit."""
    capability = torch.backends.cpu.get_cpu_capability()
    return kernels(torch.__version__, capability, torch.get_num_threads(), torch.get_float32_matmul_precision())
