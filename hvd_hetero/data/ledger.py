"""The ledger of a run: which rank did which samples in which micro-batch, noted as rounds are cut and finished."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_hetero.rounds import MicroBatch
from hvd_hetero.telemetry.ledger_reader import KEY, micro_batch_seed

if TYPE_CHECKING:
    from hvd_hetero.data.sample_order import Cut

logger = logging.getLogger(__name__)


class Ledger:
    """What all ranks do in the rounds of one cutter, in one rank's hands."""

    def __init__(self, rank: int) -> None:
        self.write: Callable[[dict[str, Any]], object] | None = None
        """What takes the entry of a round; None on ranks that write none."""
        self._rank = rank
        self._open: deque[tuple[int, list[Cut]]] = deque()  # rounds that are not finished, and each rank's part
        self._begun = (-1, 0)  # the round and the number of the micro-batch that this rank has begun last
        self._in_parts = False

    def cut(self, round: int, shares: Callable[[], list[Cut]], *, first: bool) -> None:
        """Note a round that was cut; ``first``: none that was cut before is still to finish."""
        if first:  # those before were discarded
            self._open.clear()
            self._begun = (-1, 0)
        if self.write is not None:
            self._open.append((round, shares()))

    def finish(self, done: Sequence[float] = (), weights: Sequence[float] = ()) -> None:
        """Write the oldest round: each rank has done so many samples of it, or all; they count ``weights``."""
        if self.write is None or not self._open:
            return
        round, shares = self._open.popleft()
        ranks = []
        for cut in shares:
            # Where all have to be done, fewer samples than planned are such as count nothing.
            count = int(done[cut.rank]) if cut.plan.ends == "first" and done else cut.samples
            ends = np.cumsum([work.samples for work in cut.micro_batches()])
            parts = np.split(np.asarray(cut.part)[:count], ends[ends < count])
            ranks.append([part.tolist() for part in parts if len(part)])
        total = sum(weights) or sum(len(part) for parts in ranks for part in parts)
        self.write({"round": round, "epoch": shares[0].epoch, "total": total, KEY: ranks})

    def seed(self, work: MicroBatch) -> int | None:
        """Return the seed of a micro-batch that this rank begins; None for what follows of one that it has begun."""
        begun, self._begun = self._begun, (work.round, work.number)
        if begun != self._begun:
            return micro_batch_seed(work.round, self._rank, work.number)
        if not self._in_parts:
            self._in_parts = True
            logger.warning(
                "round %d: rank %d does a micro-batch in parts, so a replay of the ledger draws other random numbers "
                "for it, as in dropout", work.round, self._rank,
            )  # fmt: skip
        return None
