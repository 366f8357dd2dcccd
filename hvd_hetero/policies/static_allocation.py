"""Static allocation: a ratio given by hand, reached by gradient accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hvd_hetero.allocation.largest_remainder import proportional
from hvd_hetero.bounds import Said
from hvd_hetero.checks import integer
from hvd_hetero.policies.policy import Policy, checked_micro_batch
from hvd_hetero.rounds import RoundPlan


class StaticAllocation(Policy):
    r"""Rank i accumulates ``w_i`` micro-batches before each synchronisation (self-adaptive-allocation, section III.A).

    All micro-batches have about the same size, (global batch) / (w_1 + … + w_n). So rank i holds the share ``w_i /
    sum(w)`` of every round, and its memory need does not depend on its share. A weight of 0 is allowed: such a rank
    takes part in the synchronisation and holds no data.

    Beside a reducer of your own all ranks do equally many micro-batches, one as a rule. There the largest weight takes
    the most memory, unless ``max_micro_batch`` bounds it (as in ``LBBSP``).

    Differences from the paper: the paper fixes the micro-batch, and the global batch follows from the sum of the
    weights. Here the global batch is given and kept exactly; where it does not divide, the micro-batches of a rank
    differ by one sample. The paper cuts the data set in the ratio of the weights beforehand. Here each round's slice of
    one shared permutation is cut so, which leaves nothing over at the end of the epoch either.
    """

    name: ClassVar[str] = "static"
    measures: ClassVar[bool] = False
    shares_alone: ClassVar[bool] = True

    def __init__(self, weights: Sequence[int], *, max_micro_batch: Said = None) -> None:
        self.max_micro_batch = checked_micro_batch(max_micro_batch)
        try:
            given = list(weights)
        except TypeError:
            raise TypeError(
                f"weights must hold one integer per rank, got {weights!r} ({type(weights).__name__}); "
                f"write StaticAllocation([3, 7]) for two ranks"
            ) from None
        remedy = "give the rank's micro-batches per round; 0 gives it no data"
        self.weights = tuple(integer(f"weights[{rank}]", w, 0, remedy=remedy) for rank, w in enumerate(given))
        if not any(self.weights):
            raise ValueError(
                f"weights must hold at least one positive number, got {given!r}; "
                f"write StaticAllocation([1, 1]) for equal shares of two ranks"
            )

    @property
    def accumulates(self) -> bool:
        """True if a rank may do several micro-batches: if some weight is larger than 1."""
        return max(self.weights) > 1 or self.max_micro_batch is not None

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Return shares in the ratio of the weights, one micro-batch per unit of weight."""
        if len(self.weights) != workers:
            raise ValueError(
                f"weights must name one number per rank: got {len(self.weights)} for {workers} ranks; "
                f"launch with -np {len(self.weights)} or give {workers} weights"
            )
        if global_batch < sum(self.weights):
            raise ValueError(
                f"global_batch must be at least the sum of the weights, {sum(self.weights)}, so that each micro-batch "
                f"holds a sample; got {global_batch}: raise global_batch, or give smaller weights in the same ratio"
            )
        # Every rank with a weight w gets at least w samples: one for each of its micro-batches.
        samples = proportional(self.weights, global_batch, minimum=self.weights)
        return RoundPlan(tuple(int(x) for x in samples), self.weights)
