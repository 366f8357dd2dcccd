"""What this rank shows of its parameters, so that ranks notice different ones (``hvd_hetero.witness``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hvd_hetero.witness import kernels, piece_of, shown

__all__ = ["ParameterNorm", "kernels_here"]

_ACCURATE = (torch.float32, torch.float64)


class ParameterNorm:
    """What a rank shows of its parameters in each round. They are in the same order on every rank."""

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        # Not of an accelerator's: to read them would wait for the device. They keep their turn, since other ranks may
        # have theirs on the CPU.
        self._watched: list[torch.Tensor] = []
        self.names: list[str] = []
        self.sizes: list[int] = []
        self.widths: list[int] = []
        self.extend(names)

    def extend(self, names: Mapping[torch.Tensor, str]) -> None:
        """Watch these, too."""
        for parameter, name in names.items():
            if parameter.is_floating_point() and parameter.numel():
                self._watched.append(parameter)
                self.names.append(name)
                self.sizes.append(parameter.numel())
                self.widths.append(parameter.element_size())

    def at(self, round: int) -> tuple[float, float]:
        """Return what is shown in this round; zeros where there is nothing to show."""
        if not self._watched:
            return 0.0, 0.0
        which, part = piece_of(round, self.sizes)
        parameter = self._watched[which]
        if parameter.device.type != "cpu":
            return 0.0, 0.0
        piece = _in_memory(parameter)[part]
        numbers = piece if piece.dtype in _ACCURATE else piece.float()
        return shown(numbers.numpy(), piece.view(torch.uint8).numpy())


def kernels_here() -> float:
    """Return a checksum of what decides how updates are rounded."""
    return kernels(
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
    )


def _in_memory(parameter: torch.Tensor) -> torch.Tensor:
    """Its numbers in the order of their addresses, which needs no copy."""
    parameter = parameter.detach()
    if parameter.is_contiguous():
        return parameter.view(-1)
    if parameter.stride() == torch.empty_like(parameter, device="meta").stride():  # without gaps
        return parameter.as_strided((parameter.numel(),), (1,))
    return parameter.reshape(-1)
