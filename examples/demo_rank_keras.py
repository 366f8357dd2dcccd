"""One rank of the demo (see ``demo.py``), with Keras: the same training three times, on ranks of unequal speed.

The phases are as in ``demo_rank.py``: BSP, LB-BSP, and the oracle in two halves around LB-BSP. It runs on Keras 3,
and on tf_keras if TF_USE_LEGACY_KERAS=1 is set. The oracle calls Horovod's grouped allreduce in the train step, on a
tf.data pipeline of fixed batches, because Horovod's optimizer for Keras synchronises nothing on Keras 3.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import demo_data
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_hetero.telemetry import read_run
from hvd_hetero.testing import SlowDown, pin_to_core, slow_down
from keras_callbacks import LoadBalance, resize_batches

keras = tf.keras


def layers() -> tuple[Any, Any]:
    """Return inputs and outputs of a small convolutional network."""
    inputs = keras.layers.Input((demo_data.SIDE, demo_data.SIDE, 3))
    x = keras.layers.Conv2D(32, 3, padding="same", activation="relu")(inputs)
    x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Conv2D(96, 3, padding="same", activation="relu")(x)
    x = keras.layers.Conv2D(96, 3, padding="same", activation="relu")(x)
    x = keras.layers.Flatten()(keras.layers.MaxPooling2D()(x))
    return inputs, keras.layers.Dense(demo_data.CLASSES)(x)


class Network(keras.Model):  # type: ignore[misc]
    """The demo's model; its train step pays for this rank's slowness if no processor quota can be set."""

    slowness: SlowDown
    tape: Callable[[tf.GradientTape], Any] | None = None
    """Function that wraps the tape for the oracle; None if the optimizer synchronises."""
    share = 1.0

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        began = tf.numpy_function(lambda _: time.perf_counter(), [x[0, 0, 0, 0]], tf.float64)
        with tf.control_dependencies([began]):
            x = tf.identity(x)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            scaled = loss * self.share
        variables = [v if isinstance(v, tf.Variable) else v.value for v in self.trainable_variables]
        if self.tape is None:
            gradients = self.paid(began, tape.gradient(scaled, variables))
        else:
            gradients = self.tape(tape, lambda found: self.paid(began, found)).gradient(scaled, variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}

    def paid(self, began: tf.Tensor, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.control_dependencies(gradients):
            slept = tf.numpy_function(
                lambda t: self.slowness.after_compute(time.perf_counter() - float(t)), [began], tf.float64
            )
        with tf.control_dependencies([slept]):
            return [tf.identity(g) for g in gradients]


class StockTape:
    """A tape whose gradients are paid for and then summed by plain Horovod."""

    def __init__(self, tape: tf.GradientTape, pay: Callable[[list[tf.Tensor]], list[tf.Tensor]]) -> None:
        self._tape = tape
        self._pay = pay

    def gradient(self, loss: tf.Tensor, variables: list[tf.Variable]) -> list[tf.Tensor]:
        gradients = self._pay(self._tape.gradient(loss, variables))
        summed: list[tf.Tensor] = hvd.grouped_allreduce(gradients, op=hvd.Sum, name="HorovodAllreduce_oracle")
        return summed


class Progress(keras.callbacks.Callback):  # type: ignore[misc]
    """Report every round, of which some may be done already, and end fit after ``rounds``."""

    def __init__(self, tell: Callable[[int], None], done: int = 0) -> None:
        super().__init__()
        self._tell = tell
        self.done = done
        self.rounds: int | None = None
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.done += 1
        self.times.append(time.perf_counter())
        self._tell(self.done)
        if self.done == self.rounds:
            self.model.stop_training = True


class Rank:
    """Parts that the phases share: the data, this rank's slowness, and progress."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.data = demo_data.images(demo_data.training_samples(options.global_batch), seed=2)
        self.test = demo_data.images(demo_data.TEST_SAMPLES, seed=3)
        slow = hvd.rank() == hvd.size() - 1
        self.slowness = slow_down(options.slow if slow else 1.0)

    def say(self, **event: object) -> None:
        if hvd.rank() == 0:
            print(json.dumps(event), flush=True)

    def network(self) -> Network:
        """Return the compiled network, with the same weights on every call."""
        keras.utils.set_random_seed(demo_data.SEED)
        model = Network(*layers())
        model.slowness = self.slowness
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(demo_data.LEARNING_RATE, momentum=demo_data.MOMENTUM), loss)
        return model

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        x, y = self.data
        return np.ascontiguousarray(x.transpose(0, 2, 3, 1)), y

    def finish(self, phase: str, model: Network, samples_per_s: float) -> None:
        """Report throughput after the warm-up, and loss on unseen data."""
        x, y = self.test
        logits = model(tf.constant(x.transpose(0, 2, 3, 1)))
        loss = float(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)))
        self.say(phase=phase, loss=loss, samples_per_s=samples_per_s)
        hvd.allreduce(tf.zeros(1), name=f"end of {phase}")

    def balanced(self, policy: str) -> None:
        """Train as a user of hvd-hetero does."""
        options = self.options
        model = self.network()
        telemetry = options.out / f"{policy}.jsonl"
        balance = LoadBalance(policy, global_batch=options.global_batch, telemetry=telemetry)
        batches = resize_batches(self.arrays(), balance, shuffle=True, seed=demo_data.SEED)

        def tell(done: int) -> None:
            self.say(phase=policy, round=done, batch=balance.plan)
            if options.rounds is None and done == 4 * demo_data.WARM_UP_ROUNDS:  # these show the machine's pace
                round_s = float(np.median(np.diff(progress.times[demo_data.WARM_UP_ROUNDS :])))
                rounds = demo_data.affordable_rounds(round_s, options.slow)
                options.rounds = hvd.broadcast_object(rounds, root_rank=0, name="rounds")
                progress.rounds = options.rounds - 1  # by one more, all ranks hear of the end
                self.say(rounds=options.rounds)

        progress = Progress(tell)
        most = options.rounds or demo_data.ROUNDS
        model.fit(batches.repeat(), steps_per_epoch=most, verbose=0, callbacks=[balance, progress])
        self.say(phase=policy, round=options.rounds, batch=balance.plan)
        balance.close()
        warm = read_run(telemetry).after(demo_data.WARM_UP_ROUNDS) if hvd.rank() == 0 else None
        self.finish(policy, model, warm.throughput if warm else math.nan)

    def oracle(self) -> Iterator[None]:
        """Train with stock Horovod and a split set by hand from the speeds under BSP, pausing half-way."""
        options = self.options
        # Named, because Horovod names an object after its type, and None has another type than a list.
        split = demo_data.hand_set_split(options) if hvd.rank() == 0 else None
        shares = hvd.broadcast_object(split, root_rank=0, name="shares")
        lists = demo_data.hand_set_batches(options, shares, hvd.rank())
        x, y = (tf.constant(a) for a in self.arrays())
        model = self.network()
        model.tape = StockTape
        model.share = shares[hvd.rank()] / options.global_batch
        half = options.rounds // 2
        warm_up = demo_data.WARM_UP_ROUNDS
        seconds = 0.0
        for first, end in ((0, half), (half, options.rounds)):
            indices = tf.data.Dataset.from_tensor_slices(np.array(lists[first:end]))
            batches = indices.map(lambda i: (tf.gather(x, i), tf.gather(y, i))).prefetch(1)
            progress = Progress(lambda done: self.say(phase="oracle", round=done, batch=shares), first)
            model.fit(batches, verbose=0, callbacks=[progress])
            seconds += progress.times[-1] - progress.times[warm_up - 1]
            if first == 0:
                yield
        self.finish("oracle", model, (options.rounds - 2 * warm_up) * options.global_batch / seconds)


def main() -> None:
    hvd.init()
    pin_to_core(hvd.rank())
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)  # one computes while another waits for Horovod
    rank = Rank(demo_data.rank_options())
    rank.say(slowness=hvd.allgather_object(rank.slowness.describe()))
    with rank.slowness:
        rank.balanced("bsp")
        oracle = rank.oracle()
        next(oracle)
        rank.balanced("lb-bsp")
        for _ in oracle:
            raise AssertionError("the oracle has two halves")


if __name__ == "__main__":
    main()
