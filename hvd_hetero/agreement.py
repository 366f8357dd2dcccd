"""Whether the ranks are still together: what must be the same in every row of the table, and what it means if not."""

from __future__ import annotations

from hvd_hetero.errors import PlanMismatchError
from hvd_hetero.rounds import RoundTable

__all__ = ["require_agreement"]

# To what relative tolerance. The last two have one because unlike processors round unlike; what they are to find,
# updates that differ, is far larger.
_MUST_AGREE = (
    (
        "fingerprint",
        0.0,
        "follow another plan or another order of the data than rank 0, or train other parameters. Give all ranks the "
        "same policy, global_batch, dataset (of their own: stream='shard'), seed, num_workers and prefetch_factor, let "
        "them leave an epoch at the same round (stop_at of the loader), and freeze parameters on all of them at once",
    ),
    (
        "settings",
        1e-5,
        "have other hyper-parameters (learning rate, momentum, …) than rank 0. The body of the loop runs once per "
        "micro-batch, and not at all on a rank without data: do what belongs to an update, such as scheduler.step(), "
        "in optimizer.register_step_post_hook(…), or once per epoch",
    ),
    (
        "witness",
        1e-3,
        "hold other parameters than rank 0. The body of the loop does not run on a rank without data: change "
        "gradients, as clipping does, in optimizer.register_step_pre_hook(…), and let all ranks change parameters "
        "alike",
    ),
)


def require_agreement(round: int, table: RoundTable) -> None:
    """Raise on every rank alike, if any of them has gone its own way."""
    if table.unanimous:
        return
    for name, tolerance, meaning in _MUST_AGREE:
        if ranks := table.disagreement(name, tolerance):
            raise PlanMismatchError(f"round {round}: ranks {ranks} {meaning}")
