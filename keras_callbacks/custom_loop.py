"""Training loops of the user's own, around a GradientTape."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_hetero.balancer import MicroBatch
from keras_callbacks.pipeline.balanced_dataset import BalancedDataset
from keras_callbacks.step.exchange import SHARE, ask

if TYPE_CHECKING:
    from keras_callbacks.load_balance import LoadBalance

__all__ = ["batches", "weighted_gradients"]


def weighted_gradients(tape: tf.GradientTape, loss: Any, variables: Sequence[Any], balance: LoadBalance) -> list[Any]:
    """The gradients of the mean loss over all samples of the round, on every rank alike. Eagerly or in a tf.function.

        balance.start(model, optimizer)                       # rank 0's weights, for all
        data = resize_batches((x, y), balance, shuffle=True)
        for epoch in range(epochs):
            for x, y in balance.batches(data):
                with tf.GradientTape() as tape:
                    loss = loss_of(y, model(x, training=True))    # the mean over the batch
                gradients = weighted_gradients(tape, loss, model.trainable_variables, balance)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    Call it once for every batch. All ranks run the loop's body equally often: a rank that has nothing in a round gets a
    batch of one sample that weighs nothing. What a policy would do in micro-batches is one batch here.
    """
    gradients = tape.gradient(loss, list(variables))
    present = [g for g in gradients if g is not None]
    if not present:
        raise ValueError(
            f"the loss reaches none of the {len(gradients)} variables given; compute it inside the tape, from "
            "variables that the tape watches"
        )
    if unknown := balance.common_start.lacks(variables):
        raise ValueError(
            f"{len(unknown)} of the {len(gradients)} variables given have values of this rank's own, first "
            f"{unknown[0].name!r}: they were made after balance.start(model, optimizer), or are not of its model. Call "
            "it on all ranks once they are made, between two batches"
        )
    share = ask(balance, balance.share, SHARE, after=tf.nest.flatten(present, expand_composites=True))
    reduced = iter(balance.all_reduce(present, share))
    return [None if g is None else next(reduced) for g in gradients]


def batches(balance: LoadBalance, data: BalancedDataset) -> Iterator[Any]:
    """One epoch's batches of this rank; each is a round, which ends when the next is asked for."""
    plan = balance.balancer.plan()
    if plan.ends == "first" or plan.local or balance.mixing is not None:
        raise ValueError(
            f"policy {balance.policy.name!r} with this sync does not end a round by averaging gradients alone, which "
            "only model.fit does; use fit, or for a loop of your own another policy and sync='allreduce'"
        )
    if not isinstance(data, BalancedDataset):
        raise ValueError(
            f"data must come from resize_batches, whose batches follow the plan, got {type(data).__name__}; write "
            "balance.batches(resize_batches((x, y), balance))"
        )
    for pair in balance.common_start.new(data.element_spec):
        balance.start(*pair)
    balance.queue = queue = data.queue
    balance.balancer.abandon()  # of a loop that was left before its last batch was used
    iterator = iter(data)
    number = 0
    while number == 0 or not queue.at_end:
        queue.prepare(new=number == 0)
        balance.look()
        asked_at = time.perf_counter()
        batch = next(iterator)
        with queue.lock:
            cut = queue.take()
            work = MicroBatch(cut.plan, cut.samples, True, cut.epoch, cut.place)
            balance.balancer.begin(work, time.perf_counter() - asked_at)
        yield batch
        balance.balancer.expect_next()
        balance.balancer.applied(time.perf_counter() - balance.agreed_at)
        number += 1
