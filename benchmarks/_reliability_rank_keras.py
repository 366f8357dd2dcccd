"""One rank of an elastic job with Keras: train under faults, and log what it sees."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from _reliability_job import (
    FEATURES,
    MOMENTUM,
    RATE,
    REAL_S,
    SEED,
    Clock,
    Log,
    end,
    faults_of_job,
    global_batch,
    line,
    meet,
    policy_of,
    seconds_per_sample,
    telemetry,
    told,
)  # fmt: skip

from keras_callbacks import LoadBalance, resize_batches
from keras_callbacks.elastic import CommitStateCallback, KerasState

keras = tf.keras


class Watched(keras.Sequential):
    """Let every batch pay its simulated time on its way into the model."""

    watch: Any = None

    def train_step(self, batch):
        x = tf.numpy_function(Watched.watch, batch, tf.float64)
        x.set_shape((None, FEATURES))
        return super().train_step((x, batch[1][:, :1]))


class StopAt(keras.callbacks.Callback):
    """Stop all ranks after the next round, which informs them."""

    def __init__(self, balance: LoadBalance, state: KerasState, job: dict[str, Any]) -> None:
        super().__init__()
        self.balance, self.state, self.job, self.at = balance, state, job, None

    def on_train_begin(self, logs=None):
        self.at = end(self.job, self.state.resets, self.balance.rounds)

    def on_train_batch_end(self, batch, logs=None):
        if self.at is not None and self.balance.rounds + 1 >= self.at:
            self.model.stop_training = True


def main() -> None:
    told()
    job = json.loads(sys.argv[1])
    meet(job)
    hvd.init()
    keras.backend.set_floatx("float64")
    clock, log = Clock(), Log(job["directory"])
    faults = faults_of_job(job, clock)
    needs_s = seconds_per_sample(job["seconds_per_sample"])
    model = Watched([keras.layers.Input((FEATURES,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(job.get("rate", RATE), momentum=job.get("momentum", MOMENTUM)), "mse")
    state = KerasState(model, scale_learning_rate="per_rank_batch" in job, seen=[])

    @hvd.elastic.run
    def train(state: KerasState) -> None:
        balance = LoadBalance(
            policy_of(job["policy"], hvd.size()), global_batch=global_batch(job, hvd.size()),
            sync=job.get("sync", "allreduce"), telemetry=telemetry(job, state.resets),
        )  # fmt: skip
        session = balance._session
        balancer = session.balancer
        balancer.meter.batch.clock = clock
        faults.attach(balance, state)

        def watch(x: Any, y: Any) -> Any:
            clock.pass_s(len(x) * needs_s)
            time.sleep(REAL_S)
            if balancer.work.samples:  # otherwise it is a stand-in
                log(
                    membership=state.resets, round=balancer.rounds, epoch=balancer.work.epoch,
                    samples=y[:, 1].astype(int).tolist(),
                )  # fmt: skip
            return x

        def begins(logs: Any = None) -> None:
            log(
                membership=state.resets, begins=balance.rounds, rank=hvd.rank(), size=hvd.size(), plan=balance.plan,
                needs_s=needs_s, rate=float(tf.convert_to_tensor(model.optimizer.learning_rate)),
                prefix=session.prefix, at_s=time.monotonic(), seen=len(state.seen),
            )  # fmt: skip

        Watched.watch = staticmethod(watch)
        log.rounds(balancer, membership=state.resets)
        model.fit(
            resize_batches(line(job["samples"]), balance, shuffle=True, seed=SEED),
            initial_epoch=state.epoch, epochs=job["epochs"], verbose=0, shuffle=False,
            callbacks=[
                keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: state.seen.append(epoch)),
                balance, CommitStateCallback(state, job["rounds_per_commit"]), StopAt(balance, state, job),
                keras.callbacks.LambdaCallback(on_train_begin=begins),
            ],
        )  # fmt: skip
        log(membership=state.resets, ends=balance.rounds)

    train(state)
    parameters = np.concatenate([w.ravel() for w in model.get_weights()]).tolist()
    log(parameters=parameters, size=hvd.size(), resets=state.resets, seen=state.seen)


if __name__ == "__main__":
    main()
