"""The rounds of one epoch, for a user's own loop: each batch is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from keras_callbacks.pipeline.balanced_dataset import BalancedDataset
from keras_callbacks.pipeline.sources import number_from
from keras_callbacks.session import FitSession


def batches(session: FitSession, data: BalancedDataset) -> Iterator[Any]:
    """Yield one epoch's batches of this rank; each is a round, which ends when the next is asked for."""
    balancer, calls = session.balancer, session.calls
    if not session.sums_gradients:
        raise ValueError(
            f"policy {session.policy.name!r} with this sync does not end a round by averaging gradients alone, which "
            "only model.fit does; use fit, or for a loop of your own another policy and sync='allreduce'"
        )
    if not isinstance(data, BalancedDataset):
        raise ValueError(
            f"data must come from resize_batches, whose batches follow the plan, got {type(data).__name__}; write "
            "balance.batches(resize_batches((x, y), balance))"
        )
    if data.queue.cuts:
        raise ValueError(
            "max_micro_batch_cost is for model.fit: a round of a loop of your own is one batch. Leave it out, with a "
            "smaller global_batch of LoadBalance"
        )
    for model, optimizer in session.common_start.new(data.element_spec):
        session.start(model, optimizer)
    session.trains_here()
    session.queue = queue = data.queue
    session.want_epoch(queue)
    balancer.abandon()  # a round of a loop that was left before its last batch was used
    iterator = iter(data)
    number = 0
    while number == 0 or not queue.at_end:
        queue.prepare(new=number == 0)
        calls.prepare()
        batch = next(iterator)
        calls.begin_whole_round()
        if queue.weight_of is not None:
            calls.weigh(float(number_from("weight_of", queue.weight_of, batch)))
        yield batch
        balancer.expect_next()
        calls.applied()
        number += 1
