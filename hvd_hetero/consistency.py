"""Whether the ranks are still together: what must be the same in every row of the table, and what it means if not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvd_hetero.errors import PlanMismatchError
from hvd_hetero.rounds import RoundTable

__all__ = ["WaysOut", "require_agreement", "settings_of"]


@dataclass(frozen=True, slots=True)
class WaysOut:
    """What to do about ranks that went their own ways. An adapter has its own, in the words of its framework."""

    fingerprint: str = "Give all ranks the same policy, global_batch, data, seed, lead and parameters to train"
    settings: str = "Change them on all ranks alike, between the same two rounds"
    witness: str = "Change parameters on all ranks alike, and gradients only once they are summed over the ranks"
    unused: str = "Finish every micro-batch before the next one; to accumulate, set max_micro_batch of the policy"
    waiting: str = "Let all ranks call the same collectives in the same order"
    memory: str = "use a smaller model"


# To what relative tolerance. The last two have one because unlike processors round unlike; what they are to find,
# updates that differ, is far larger.
_MUST_AGREE = (
    ("fingerprint", 0.0, "follow another plan or another order of the data than rank 0, or train other parameters"),
    ("settings", 1e-5, "have other hyper-parameters (learning rate, momentum, …) than rank 0"),
    ("witness", 1e-3, "hold other parameters than rank 0"),
)


def require_agreement(round: int, table: RoundTable, ways_out: WaysOut) -> None:
    """Raise on every rank alike, if any of them has gone its own way."""
    if table.unanimous:
        return
    for name, tolerance, meaning in _MUST_AGREE:
        if ranks := table.disagreement(name, tolerance):
            raise PlanMismatchError(f"round {round}: ranks {ranks} {meaning}. {getattr(ways_out, name)}")


_SETTINGS = (("momentum", 0.7), ("weight_decay", 0.5), ("betas", 0.3))  # the weights only keep them apart
_NO_RATE = 1e-30  # a rate of 0 has no logarithm


def settings_of(groups: Iterable[Mapping[str, Any]]) -> float:
    """One number for the hyper-parameters that schedules change, so made that a change shows in it.

    Learning rates enter by their logarithms, for they are small beside the rest. Not a checksum, because ranks on
    unlike processors may compute a schedule with unlike last bits.
    """
    total = 0.0
    for group in groups:
        rate = group.get("lr")
        if rate is not None:
            total += math.log(abs(float(rate)) + _NO_RATE)
        for key, weight in _SETTINGS:
            value = group.get(key)
            if value is not None:
                total += weight * float(value[0] if isinstance(value, tuple | list) else value)
    return total
