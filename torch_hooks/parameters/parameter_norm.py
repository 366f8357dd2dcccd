"""One number for the parameters, by which ranks notice that they hold different ones.

To look at all of them would take as long as an update of each. So every round looks at a piece of one tensor, the next
round at a piece of the next, and after the last at another piece of the first. With N tensors, what was done to one
alone is seen after N rounds at the most.

Of a piece x the number is ``4 |x| + <r, x>`` with r random signs, the same on every rank. The norm alone would not see
numbers that were swapped, negated or drawn again; the scalar product alone may be near zero, where a tolerance for
processors that round unlike means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

__all__ = ["PIECE", "ParameterNorm"]

PIECE = 2**14
"""Numbers in a piece: some ten microseconds."""
_SEED = 20
_LEAST = 1e-6  # zero would say that a rank has nothing to show
_ACCURATE = (torch.float32, torch.float64)


class ParameterNorm:
    """What a rank shows of its parameters in each round. They are in the same order on every rank."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        # Not of an accelerator's: to read them would wait for the device. They keep their turn, since other ranks may
        # have theirs on the CPU.
        self._watched: list[torch.Tensor] = []
        bits = np.random.Generator(np.random.PCG64(_SEED)).integers(0, 2, PIECE)
        self._signs = torch.from_numpy(2.0 * bits - 1.0)
        self._of_type: dict[torch.dtype, torch.Tensor] = {}
        self.extend(parameters)

    def extend(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch these, too."""
        for parameter in parameters:
            if parameter.is_floating_point() and parameter.numel():
                self._watched.append(parameter)

    def at(self, round: int) -> float:
        """What is shown in this round; 0 where there is nothing to show."""
        if not self._watched:
            return 0.0
        turn, which = divmod(round, len(self._watched))
        parameter = self._watched[which]
        if parameter.device.type != "cpu":
            return 0.0
        begin = turn % -(-parameter.numel() // PIECE) * PIECE
        piece = _in_memory(parameter)[begin : begin + PIECE]
        if piece.dtype not in _ACCURATE:
            piece = piece.float()
        signs = self._of_type.get(piece.dtype)
        if signs is None:
            signs = self._of_type[piece.dtype] = self._signs.to(piece.dtype)
        # Not torch.dot, whose last bits may depend on where in memory the numbers lie.
        product = (piece * signs[: len(piece)]).sum()
        return _LEAST + 4.0 * float(torch.linalg.vector_norm(piece)) + float(product)


def _in_memory(parameter: torch.Tensor) -> torch.Tensor:
    """Its numbers in the order of their addresses, which needs no copy."""
    parameter = parameter.detach()
    if parameter.is_contiguous():
        return parameter.view(-1)
    if parameter.stride() == torch.empty_like(parameter, device="meta").stride():  # without gaps
        return parameter.as_strided((parameter.numel(),), (1,))
    return parameter.reshape(-1)
