"""Which samples go where: one seeded permutation per epoch, and one cursor shared by all ranks.

Let ``π`` be the permutation of the N samples of an epoch, a function of (seed, epoch) alone, and ``c`` the cursor. A
round with the plan x_1 … x_n takes the slice ``π[c : c + X]``; rank i gets ``π[c + x_1 + … + x_{i-1} : … + x_i]``; then
c grows by X. So whatever the plans do, every sample is visited exactly once per epoch, the samples *of a round* do not
depend on the policy, and every rank does the same number of rounds. When fewer than X samples are left, the last round
is short.

No rank needs to hear from another: all compute the same permutation and follow the same plans. A checksum of the
permutation rides in the table (``RoundReport.fingerprint``), so two ranks with different data do not go on unnoticed.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from hvd_hetero.rounds import RoundPlan

__all__ = ["SharedPermutation"]


class SharedPermutation:
    """The order of one data set's samples over the epochs, and the cursor in the present one."""

    def __init__(self, length: int, *, shuffle: bool = False, seed: int = 0) -> None:
        if length < 1:
            raise ValueError(f"the dataset must hold at least one sample, its length is {length}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self.length = length
        self.shuffle = shuffle
        self.seed = seed
        self.start(0)

    def start(self, epoch: int) -> None:
        """Put the cursor at the beginning of an epoch."""
        self.epoch = epoch
        self.cursor = 0
        self._order = np.arange(self.length)
        if self.shuffle:
            np.random.Generator(np.random.PCG64([self.seed, epoch])).shuffle(self._order)
        # The order itself, not (seed, epoch): it also differs where two NumPy versions shuffle differently.
        self.checksum = zlib.crc32(self._order.astype("<i8").tobytes())

    @property
    def place(self) -> int:
        """A checksum of the order, the epoch and the cursor: what ranks must have in common to take the same round."""
        return zlib.crc32(np.array([self.checksum, self.epoch, self.cursor], dtype="<i8").tobytes())

    @property
    def remaining(self) -> int:
        """Samples of this epoch that no round has taken yet."""
        return self.length - self.cursor

    def take(self, plan: RoundPlan, rank: int) -> tuple[RoundPlan, npt.NDArray[np.int64]]:
        """The plan of the next round, shortened where the epoch ends, and this rank's samples of it."""
        if self.remaining == 0:
            raise ValueError(f"epoch {self.epoch} has no samples left; start the next one")
        plan = plan.shrink(self.remaining)
        begin = self.cursor + plan.start(rank)
        self.cursor += plan.total
        return plan, self._order[begin : begin + plan.samples[rank]]
