"""The part of ``keras_behaviour.py`` in which ranks play unequal GPUs, whose hosts only queue the work."""

from __future__ import annotations

import time
from unittest import mock

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from keras_fits import keras, on_rank_0, spread
from queued_device import Network, QueuedDevice

from hvd_hetero.policies import LBBSP
from hvd_hetero.session import balancer_of
from keras_callbacks import LoadBalance, resize_batches, session
from tests.support.device_model import DeviceModel

BATCH, ROUNDS_PER_EPOCH, EPOCHS = 64, 15, 3
CURVES = ((1.2e-3, 12e-3, 6, 40), (4.5e-3, 9e-3, 4, None))
"""Of each rank: seconds per sample, seconds, samples that saturate it, samples that fit."""
PLACE = "CPU:1"
"""A device of TensorFlow's own, as a GPU is: what the host is to know has to be sent there."""


def make_place() -> None:
    """Before TensorFlow runs anything."""
    (processor,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * 2)


class Clock:
    """Moves with the modelled work and with nothing else."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


def unequal_gpus_find_their_split_and_survive_a_shortage_of_memory() -> dict:
    """Against one process on the same global batches, and the best split of the modelled curves."""
    clock = Clock()
    devices = [DeviceModel(*curve, clock=clock, sleep=clock.pass_s) for curve in CURVES]
    device = devices[hvd.rank()]
    x = np.random.default_rng(7).normal(size=(BATCH * ROUNDS_PER_EPOCH, 4)).astype("float32")
    y = np.stack([np.sin(x.sum(1)), np.arange(len(x))], 1).astype("float32")

    def made(queued: DeviceModel) -> Network:
        keras.utils.set_random_seed(3)
        model = Network(queued, PLACE)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
        return model

    records: list[dict] = []
    with (
        mock.patch.object(time, "perf_counter", clock),
        mock.patch.object(session, "device_here", return_value=QueuedDevice(device, place=PLACE)),
    ):
        model = made(device)
        balance = LoadBalance(LBBSP(device="gpu"), global_batch=BATCH)
        balance.on_round(records.append)
        data = resize_batches((x, y), balance)
        told = model.fit(data, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=[balance]).history
        balance.close()
    limit = hvd.broadcast_object(balancer_of(balance).meter.limit, root_rank=0)

    def latest_s(samples: list[int]) -> float:
        counts = (-(-samples[0] // limit), 1)
        return max(k * d.gamma.seconds(n / k) for d, n, k in zip(devices, samples, counts, strict=True))

    def alone() -> dict:
        one = made(DeviceModel(1e-9, 1e-9))
        history = one.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, shuffle=False).history
        best_s = min(latest_s([n, BATCH - n]) for n in range(1, BATCH))
        return {"weights": one.get_weights(), "history": history, "best_s": best_s}

    single = on_rank_0(alone)
    return {
        "limit": limit,
        "over the best": [latest_s(record["samples"]) / single["best_s"] for record in records],
        "spread": spread(model),
        "weights": max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), single["weights"], strict=True)),
        "history": max(float(np.abs(np.array(told[k]) / v - 1).max()) for k, v in single["history"].items()),
    }
