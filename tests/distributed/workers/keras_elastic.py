"""The part of ``keras_conformance.py`` about elastic state: commit, restore, sync, and what a fit does after resets."""

from __future__ import annotations

from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.elastic import run_fn
from horovod.common.exceptions import HorovodInternalError
from keras_fits import on_rank_0

from hvd_hetero.policies import NonBlocking, StaticAllocation
from keras_callbacks import LoadBalance, resize_batches
from keras_callbacks.elastic import CommitStateCallback, KerasState

keras = tf.keras
BATCH, SAMPLES, EPOCHS = 8, 44, 3  # six rounds an epoch, the last one short


def network(number: float, optimizer: Any) -> Any:
    """All weights the same number."""
    start = keras.initializers.Constant(number)
    layer = keras.layers.Dense(2, kernel_initializer=start, bias_initializer=start)
    model = keras.Sequential([keras.layers.Input((2,)), layer])
    model.compile(optimizer, "mse")
    return model


def snapshot(state: KerasState) -> dict[str, Any]:
    optimizer = state.model.optimizer
    rate, scale = optimizer.learning_rate, getattr(optimizer, "dynamic_scale", getattr(optimizer, "loss_scale", 0.0))
    return {
        "weight": sorted({float(x) for w in state.model.get_weights() for x in w.ravel()}),
        "rate": round(float(tf.convert_to_tensor(rate)), 6),
        "scale": float(tf.convert_to_tensor(scale)),
        "epoch": state.epoch,
        "batch": state.batch,
        "best": state.best,
    }


def state_is_committed_restored_and_synchronised() -> dict:
    """What the state holds after each call; every rank begins with numbers of its own."""
    rank = hvd.rank()
    inner = keras.optimizers.Adam(0.001 * (rank + 1))
    optimizer = keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=1024.0 * (rank + 1))
    model = network(1.0 + rank, optimizer)
    state = KerasState(model, batch=20 + rank, epoch=10 + rank, best=0.5 + rank)
    outcome = {"made": snapshot(state)}

    def change() -> None:
        model.set_weights([np.full_like(w, 7.0) for w in model.get_weights()])
        optimizer.learning_rate = 0.25
        state.batch, state.epoch, state.best = 21, 11, 0.25

    state.sync()
    outcome["synchronised"] = snapshot(state)
    change()
    state.restore()
    outcome["restored"] = snapshot(state)
    change()
    state.commit()
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    state.restore()
    outcome["committed"] = snapshot(state)
    return outcome


class Fails(keras.callbacks.Callback):
    """What Horovod raises where a rank was lost, once on all ranks: in the middle of an epoch, and at another's end."""

    def __init__(self, balance: LoadBalance, failures: set[tuple[str, int, int]]) -> None:
        super().__init__()
        self.balance, self.failures, self.epoch = balance, failures, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self._fail("batch", batch)

    def on_epoch_end(self, epoch, logs=None):
        self._fail("epoch", 0)

    def _fail(self, what, batch):
        if (what, self.epoch, batch) in self.failures:
            self.failures.remove((what, self.epoch, batch))
            raise HorovodInternalError(f"{what} {self.epoch}")


def a_fit_goes_on_after_failures(policy: Any, *, first: bool, kept: int = 4, dataset: bool = False) -> dict:
    """Three failures, each followed by what Horovod does after one; what was committed, against one process."""
    one_process_does_the_same = not dataset and not isinstance(policy(), NonBlocking)
    rng = np.random.default_rng(11)
    x = rng.normal(size=(SAMPLES, 2)).astype("float32")
    y = np.arange(SAMPLES, dtype="float32")[:, None] + np.zeros(2, "float32")
    failures = {("batch", 0, 4), ("batch", 1, 2), ("epoch", 1, 0)}
    fits: list[list[int]] = []
    seen: list[float] = []
    committed: list[float] = []

    class Watched(keras.Sequential):
        def train_step(self, batch):
            tf.numpy_function(lambda y: seen.extend(y[:, 0].tolist()), [batch[1]], [])
            return super().train_step(batch)

    start = keras.initializers.Constant(0.5)
    model = Watched([keras.layers.Input((2,)), keras.layers.Dense(2, kernel_initializer=start)])
    model.compile(keras.optimizers.Adam(0.01), "mse")

    class Committed(KerasState):
        _hang_up = staticmethod(lambda: None)  # nobody is gone, see below

        def save(self) -> None:
            super().save()
            committed.extend(seen)
            seen.clear()

    state = Committed(model)

    # No rank is gone, so Horovod itself does not begin again: outside an elastic launch, its rendezvous still hands out
    # the former addresses to a rank that is quicker than the others, which then finds no one there.
    @partial(run_fn, reset=lambda: None)
    def train(state: KerasState) -> None:
        seen.clear()  # what no commit has seen is lost
        balance = LoadBalance(policy(), global_batch=BATCH)
        arrays = tf.data.Dataset.from_tensor_slices((x, y)) if dataset else (x, y)
        commit = CommitStateCallback(state, batches_per_commit=kept)
        others = [Fails(balance, failures), balance]
        fits.append([state.epoch, state.batch])
        model.fit(
            resize_batches(arrays, balance, shuffle=not dataset, seed=2), initial_epoch=state.epoch, epochs=EPOCHS,
            verbose=0, shuffle=False, callbacks=[commit, *others] if first else [*others, commit],
        )  # fmt: skip

    def alone() -> list[np.ndarray]:
        single = network(0.5, keras.optimizers.Adam(0.01))
        single.set_weights([np.full((2, 2), 0.5, "float32"), np.zeros(2, "float32")])
        for epoch in range(EPOCHS):
            order = np.arange(SAMPLES)
            np.random.Generator(np.random.PCG64([2, epoch])).shuffle(order)
            single.fit(x[order], y[order], batch_size=BATCH, verbose=0, shuffle=False)
        return single.get_weights()

    train(state)
    everyone = hvd.allgather_object(committed)
    outcome: dict[str, Any] = {}
    if one_process_does_the_same:
        pairs = zip(model.get_weights(), on_rank_0(alone), strict=True)
        outcome["difference"] = max(float(np.abs(a - b).max()) for a, b in pairs)
    return outcome | {
        "fits": fits,
        "stands": [state.epoch, state.batch],
        "visits": sorted(int(i) for each in everyone for i in each),
        "iterations": int(model.optimizer.iterations),
        "left": len(failures),
    }


CASES: dict[str, Any] = {
    "elastic state": state_is_committed_restored_and_synchronised,
    "elastic, commits last": lambda: a_fit_goes_on_after_failures(
        lambda: StaticAllocation([3, 1]), first=False, kept=3
    ),
    "elastic, commits first": lambda: a_fit_goes_on_after_failures(lambda: "lb-bsp", first=True),
    "elastic, unknown rounds": lambda: a_fit_goes_on_after_failures(lambda: NonBlocking(2), first=False, kept=1),
    "elastic, dataset": lambda: a_fit_goes_on_after_failures(lambda: "bsp", first=False, dataset=True),
}
