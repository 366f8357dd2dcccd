"""Rows of unequal numbers, gathered by collectives that take equal amounts.

Rank i has r_i rows. It sends a header, its r_i and what kind the rows are of, and its first ``room`` rows; all ranks
use the same ``room``. The headers show ``most = max r_i``. If most <= room, that was all. Otherwise each rank sends all
of its rows once more, in a message of ``most`` rows. So a ``room`` of 0 asks for the numbers alone, and one that is
enough saves the second call. The next ``room`` is an eighth more than ``most``, which all ranks know (the eighth is
arbitrary: numbers of touched rows vary a little from round to round).

Everything travels as bytes, so any type will do.
"""

from __future__ import annotations

import math

import torch

from hvd_hetero.errors import HeteroError
from hvd_hetero.rounds import checksum

_HEADER = 16  # bytes: two integers


class Rows:
    """Rows of this rank on their way, and all ranks' rows afterwards."""

    def __init__(self, rows: torch.Tensor, ranks: int, room: int, name: str) -> None:
        self._rows = rows.detach().contiguous()
        self._width = math.prod(rows.shape[1:]) * rows.element_size()
        self._room = room
        self._name = name
        self._counts: list[int] = []
        self._skip = _HEADER
        self.sent = self._message(_HEADER, room)
        kind = checksum(f"{rows.dtype} {tuple(rows.shape[1:])}".encode())
        self.sent[:_HEADER].view(torch.int64).copy_(torch.tensor([len(rows), kind], device="cpu"))
        self.received = [torch.empty_like(self.sent) for _ in range(ranks)]

    def enough(self) -> int:
        """Return the room for the next gather, once the messages are here."""
        headers = torch.stack([message[:_HEADER] for message in self.received]).view(torch.int64).tolist()
        self._counts, kinds = (list(each) for each in zip(*headers, strict=True))
        if len(set(kinds)) > 1:
            raise HeteroError(
                f"the ranks do not agree on {self._name!r}: rows of different types or shapes, here "
                f"{self._rows.dtype} {tuple(self._rows.shape[1:])}; give it the same on every rank"
            )
        most = max(self._counts)
        return most + most // 8

    def second(self) -> tuple[list[torch.Tensor], torch.Tensor] | None:
        """Return where to receive and what to send in a second call, if the first one did not have room for all."""
        if (most := max(self._counts)) <= self._room:
            return None
        self._skip = 0
        self.sent = self._message(0, most)
        self.received = [torch.empty_like(self.sent) for _ in self.received]
        return self.received, self.sent

    def result(self) -> torch.Tensor:
        """Return the rows of all ranks, in order of rank."""
        parts = [
            message[self._skip : self._skip + count * self._width]
            for message, count in zip(self.received, self._counts, strict=True)
        ]
        return torch.cat(parts).view(self._rows.dtype).view(sum(self._counts), *self._rows.shape[1:])

    def _message(self, header: int, room: int) -> torch.Tensor:
        """Return a message with as many rows as there is room for, and anything behind them."""
        message = torch.zeros(header + room * self._width, dtype=torch.uint8, device=self._rows.device)
        some = self._rows[:room].reshape(-1)
        message[header : header + some.nbytes].view(some.dtype).copy_(some)
        return message
