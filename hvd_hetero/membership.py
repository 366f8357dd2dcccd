"""What a training takes from one membership to the next, when ranks were lost or have come.

Three kinds of knowledge, and each lives where it can survive:

    common    plans, what the policy keeps, the count of rounds: the same on every rank, so any survivor's will do
    own       a rank's predictor, and what fits its memory: of that process and its machine, wherever it is numbered now
    place     in the data: the data side's business (``state_dict`` of the order)

Where the very same ranks have come back, all goes on as it was committed. Otherwise the allocation is negotiated anew,
before the first round: each rank tells the speed that it expects of itself, and the policy divides by what is known
(``Policy.renegotiate``). A newcomer knows nothing of itself yet, and begins with a fresh predictor.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from hvd_hetero.balancer import Balancer
from hvd_hetero.training import Wire

__all__ = ["Survival"]

logger = logging.getLogger(__name__)


class Survival:
    """One rank's memory of its training, as of the last commit."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._common: dict[str, Any] | None = None
        self._own: Mapping[str, Any] | None = None

    @property
    def has_taken_part(self) -> bool:
        """Whether this rank has committed anything: a newcomer has not."""
        return self._own is not None

    @property
    def common(self) -> dict[str, Any] | None:
        """What all ranks have committed alike; None before the first commit."""
        return self._common

    @common.setter
    def common(self, common: dict[str, Any] | None) -> None:
        self._common = common

    def keep(self, balancer: Balancer) -> None:
        """A commit, between two rounds. Nothing is sent."""
        self._common = balancer.state_dict()
        self._own = self._common.pop("pace")
        self._rank = balancer.rank

    def take_up(self, balancer: Balancer, wire: Wire, prefix: str) -> None:
        """The first thing in a new membership, before any round; a collective call.

        ``common`` must be the same on every rank: rank 0's.
        """
        common = self._common
        if common is None:
            return
        if self._own is not None:
            self._load_own(balancer)
        mine = (self._rank, balancer.pace.expected(), balancer.pace.limit)
        ranks = wire.allgather_object(mine, name=f"{prefix}.survivors")
        came_from, speeds, limits = zip(*ranks, strict=True)
        if list(came_from) == list(range(balancer.workers)) and _fits(common, balancer):
            balancer.load_state_dict({**common, "pace": balancer.pace.state_dict()})
            return
        balancer.go_on(common["rounds"], speeds, limits)
        if balancer.rank == 0:
            logger.warning(
                "%d ranks go on after round %d; %d of them are new; speeds known: %s; samples of the next round: %s",
                balancer.workers, common["rounds"], came_from.count(None),
                ", ".join("-" if math.isnan(v) else f"{v:.4g}" for v in speeds), balancer.plan().samples,
            )  # fmt: skip

    def _load_own(self, balancer: Balancer) -> None:
        assert self._own is not None, "the caller has looked"
        try:
            balancer.pace.load_state_dict(self._own)
        except ValueError as error:  # the policy is another one, as it may be where the ranks are others
            logger.warning("rank %d begins to measure its speed anew: %s", balancer.rank, error)


def _fits(common: Mapping[str, Any], balancer: Balancer) -> bool:
    """Whether the plans that were committed can go on as they are."""
    return (
        common["workers"] == balancer.workers
        and common["policy"] == balancer.policy.name
        and common["global_batch"] == balancer.global_batch
        and len(common["plans"]) == balancer.lead + 1
    )
