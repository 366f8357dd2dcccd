"""Ways to train, compared within one run: ratios to stock from alternating blocks, and seconds of turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
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


def in_turns(
    schemes: Mapping[str, Iterator[object]],
    cycles: int,
    rounds: int,
    between: Callable[[], None],
    after_cycle: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return each scheme's seconds for a turn of so many rounds, cycle by cycle; each cycle begins with another scheme.

    ``between`` waits for all ranks, as the end of a turn. Two cycles before the first do not count.
    """
    names = [*schemes]
    took: dict[str, list[float]] = {name: [] for name in names}
    between()
    for cycle in range(-2, cycles):
        first = cycle % len(names)
        for name in names[first:] + names[:first]:
            began = time.perf_counter()
            for _ in range(rounds):
                next(schemes[name])
            between()
            if cycle >= 0:
                took[name].append(time.perf_counter() - began)
        if cycle >= 0:
            after_cycle()
    return took


def forget_training() -> None:
    """Tell schemes of scaled losses apart that train in turns: the next steps of optimizers belong to none of them."""
    from torch_hooks.beside import scaled_rounds

    scaled_rounds._here.__dict__.clear()
