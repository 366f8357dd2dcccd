"""One rank of `work_sharing.py`: LB-BSP, rounds that end early, and rounds whose work is shared, in turns."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from _stumbles_rank import PER_RANK, Training
from _work_sharing_pieces import PIECES
from torch.distributed import TCPStore

from hvd_hetero.data.cutter import Cutter
from hvd_hetero.rounds import MicroBatch
from hvd_hetero.session import balancer_of
from hvd_hetero.testing import report

ROUNDS_OF_AN_EPOCH, DECK = 60, 50


class Stumbling(Training):
    """A training whose micro-batches take some times as long by chance.

    The slow ones are drawn without replacement from every ``DECK``, so that luck evens out within a block of rounds.
    """

    chance, times = 0.1, 3.0

    def __init__(self, policy: str, *how: Any) -> None:
        super().__init__(policy, *how)
        self._deck: list[float] = []

    def _stumble(self) -> float:
        if not self._deck:
            deck = np.ones(DECK)
            deck[: round(self.chance * DECK)] = self.times
            self._deck = self._chance.permutation(deck).tolist()
        return self._deck.pop()


class Sharing(Stumbling):
    """Shares by LB-BSP; each rank has a part of its own, and the rest of the round is claimed by a counter.

    What follows replaces three places of the package: which micro-batches the data side yields, how the last one is
    known, and that a rank may have done less than planned.
    """

    def __init__(self, store: TCPStore, name: str, pieces: str, number: int, *how: Any) -> None:
        super().__init__("lb-bsp", *how)
        self._store, self._name, self._pieces, self._number = store, name, PIECES[pieces], number
        self._before = self._after = 0
        """What the counter shows at both ends of the round: each rank makes one claim in vain in each."""
        self._own: deque[int] = deque()
        self._claimed: int | None = None
        self._tail = 0
        balancer, cutter = balancer_of(self.balance), self._loader._cutter
        learn = balancer.meter.learn
        balancer.meter.learn = lambda *, short=False: learn(short=False)
        balancer.stop_early = self._is_last
        cutter.micro_batches = lambda: self._micro_batches(cutter)

    def _micro_batches(self, cutter: Cutter) -> Iterator[tuple[MicroBatch, Any]]:
        while cutter.more:
            cut = cutter.cut()
            indices = cutter.order._open[-1].indices
            tail, own = self._pieces(cut.plan, self._number)
            begin = sum(map(sum, own[: cut.rank]))
            self._before, self._after = self._after, self._after + len(tail) + cut.plan.workers
            self._own, self._tail = deque(own[cut.rank]), len(tail)
            while self._own:
                size = self._own.popleft()
                yield cut.micro_batch(size, last=False), indices[begin : begin + size]
                begin += size
            # The last one of its own has claimed.
            while self._claimed is not None:
                begin = sum(map(sum, own)) + sum(tail[: self._claimed])
                size = tail[self._claimed]
                yield cut.micro_batch(size, last=False), indices[begin : begin + size]

    def _is_last(self) -> bool:
        """Claim the next micro-batch before the present one is over; return whether there is none."""
        if self._own:
            return False
        claimed = self._store.add(self._name, 1) - 1 - self._before
        self._claimed = claimed if claimed < self._tail else None
        if self._claimed is not None:
            return False
        balancer = balancer_of(self.balance)
        balancer._work = replace(balancer.work, last=True)
        return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="+", required=True)
    parser.add_argument("--factors", type=float, nargs="+", required=True)
    parser.add_argument("--chance", type=float, required=True)
    parser.add_argument("--times", type=float, required=True)
    parser.add_argument("--sample-ms", type=float, required=True)
    parser.add_argument("--fixed-ms", type=float, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--cycles", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    Stumbling.chance, Stumbling.times = options.chance, options.times
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if hvd.rank() == 0 else None
    port = hvd.broadcast_object(master.port if master else 0, name="port")
    store = TCPStore("127.0.0.1", port, is_master=False)
    how = options.factors[hvd.rank()], options.sample_ms / 1e3, options.fixed_ms / 1e3, options.seed
    samples = PER_RANK * hvd.size() * ROUNDS_OF_AN_EPOCH
    trainings: dict[str, Training] = {}
    for kind in options.kinds:
        pieces, _, number = kind.partition(":")
        trainings[kind] = (
            Sharing(store, kind, pieces, int(number), *how, samples) if number else Stumbling(kind, *how, samples)
        )
    for training in trainings.values():
        training.warm_up(options.warm_up)
    rates: dict[str, list[float]] = {kind: [] for kind in trainings}
    for cycle in range(options.cycles):
        first = cycle % len(trainings)
        for kind in (*options.kinds[first:], *options.kinds[:first]):
            rates[kind].append(trainings[kind].turn(options.rounds))
    report({kind: t.outcome() | t.account() | {"rates": rates[kind]} for kind, t in trainings.items()})
    hvd.barrier()


if __name__ == "__main__":
    main()
