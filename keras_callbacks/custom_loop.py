"""Functions for users' own training loops: gradients and averages over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_hetero.averages import averages
from keras_callbacks.load_balance import LoadBalance
from keras_callbacks.tensorflow_wire import TensorFlowWire


# It branches on nothing in a graph, and converting it with all that it calls took over a second of each rank.
@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def weighted_gradients(tape: tf.GradientTape, loss: Any, variables: Sequence[Any], balance: LoadBalance) -> list[Any]:
    """Return the mean loss's gradients over all samples of the round, equal on every rank; eagerly or in a tf.function.

        balance.start(model, optimizer)                       # rank 0's weights, for all
        data = resize_batches((x, y), balance, shuffle=True)

        @tf.function(input_signature=data.element_spec)       # one trace for batches of all sizes
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))    # the mean over the batch
            gradients = weighted_gradients(tape, loss, model.trainable_variables, balance)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        for epoch in range(epochs):
            for x, y in balance.batches(data):
                step(x, y)

    Call it once for every batch. All ranks run the loop's body equally often: a rank without data in a round gets a
    batch of one sample that weighs nothing, and ``balance.samples`` is 0. What a policy would do in micro-batches is
    one batch here.
    """
    gradients = tape.gradient(loss, list(variables))
    present = [g for g in gradients if g is not None]
    if not present:
        raise ValueError(
            f"the loss reaches none of the {len(gradients)} variables given; compute it inside the tape, from "
            "variables that the tape watches"
        )
    session = balance._session
    if unknown := session.common_start.lacks(variables):
        raise ValueError(
            f"{len(unknown)} of the {len(gradients)} variables given were not broadcast, first {unknown[0].name!r}: "
            "they were made after balance.start(model, optimizer), or are not of its model. Call it on all ranks once "
            "they are made, between two batches"
        )
    reduced = iter(session.mean_gradients(present))
    return [None if g is None else next(reduced) for g in gradients]


def average_by_samples(values: Any, samples: float) -> Any:
    """Return ``sum_i n_i v_i / sum_i n_i`` over the ranks, where rank i has found the means v_i over its n_i samples.

    One collective, so call it on every rank, with a number or an array, or with a dict of the same names. A rank
    without samples gives ``samples=0``, and whatever values. The result has the same bits on every rank.

        for x, y in balance.batches(data):
            total += balance.samples * float(step(x, y))          # 0 for a batch that only stands in
            seen += balance.samples
        loss = average_by_samples(total / max(seen, 1), seen)
    """
    wire = TensorFlowWire()
    return averages(values, samples, lambda part: wire.allgather_object(part, "hetero.average_by_samples"))
