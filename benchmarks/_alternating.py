"""Ratios to stock Horovod, from alternating blocks of one run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

STOCK, STOCK_S = "stock", "seconds of stock"


class Blocks(Protocol):
    """One way to train a network, a block at a time."""

    def block(self, steps: int) -> float:
        """Train a block and return its median seconds per step."""


def alternate(pairs: int, name: str, kinds: Mapping[str, Blocks], steps: int) -> dict[str, list[float]]:
    """Return this rank's ratios to stock for each pair of blocks, by kind, and stock's seconds per step."""
    for kind in kinds.values():
        kind.block(steps)
    ours = [kind for kind in kinds if kind != STOCK]
    ratios: dict[str, list[float]] = {kind: [] for kind in (*ours, STOCK_S)}
    for pair in range(pairs):
        # The order alternates, too, so that a drift of the machine favours none; each is as often beside stock.
        turn = ours[:: 1 if pair // 2 % 2 else -1]
        order = [*turn, STOCK] if pair % 2 else [STOCK, *turn]
        took = {kind: kinds[kind].block(steps) for kind in order}
        for kind in ours:
            ratios[kind].append(took[kind] / took[STOCK])
        ratios[STOCK_S].append(took[STOCK])
        if os.environ.get("HOROVOD_RANK", os.environ.get("RANK")) == "0":
            print(name, flush=True)
    return ratios
