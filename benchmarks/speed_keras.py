"""Gain of LB-BSP in Keras on ranks of unequal speed, over stock Horovod and over the oracle, as ratios of one run.

    python benchmarks/speed_keras.py [--write] [--cycles N]

All runs use tf_keras, where Horovod's own optimizer for Keras works, on two ranks, the second slowed down two and three
times by a processor quota. Each trains the demo's convolutional network three times, in alternating blocks of one job:
with stock Horovod (``hvd.DistributedOptimizer`` compiled in, equal batches), with the oracle (the same, with each
rank's batch set by hand from speeds measured beforehand), and with LB-BSP (the callback). A block is one call of
``fit``; its first steps do not count. Each block gives one ratio to the blocks of the same cycle; the table has medians
and quartiles. No absolute time is a result.

The oracle's split is measured by single steps before training, in which a quota throttles a rank otherwise than in
training. So LB-BSP may come out a little above it. A split tuned in passes of such steps was farther off.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import Progress

GLOBAL_BATCH = 256
BLOCK, LEFT_OUT = 10, 3  # steps
SLOW = {2.0: 1.4, 3.0: 1.8}  # how many times slower, and the least that LB-BSP is to gain
OF_ORACLE = 0.93


def rank_main(slow: float, cycles: int) -> None:
    import demo_data
    import demo_rank_keras
    import horovod.tensorflow as hvd
    import horovod.tensorflow.keras as stock_hvd
    import numpy as np
    import tensorflow as tf

    from hvd_hetero.allocation import proportional
    from hvd_hetero.testing import pin_to_core, report, slow_down
    from keras_callbacks import LoadBalance, resize_batches

    keras = tf.keras
    hvd.init()
    pin_to_core(hvd.rank())
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    slowness = slow_down(slow, "quota") if hvd.rank() == hvd.size() - 1 else slow_down(1.0)
    x, y = demo_data.images(24 * GLOBAL_BATCH, seed=2)
    arrays = np.ascontiguousarray(x.transpose(0, 2, 3, 1)), y

    def network(optimizer: Any) -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Model(*demo_rank_keras.layers())  # its own train step, in which Horovod's optimizer synchronises
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def sgd() -> Any:
        return keras.optimizers.SGD(1e-3, momentum=0.9)

    def blocks(model: Any, batches: Any, callbacks: list[Any]) -> Callable[[], float]:
        """Return a function that trains one more block and returns its samples per second."""

        class Timer(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_begin(self, logs: Any = None) -> None:
                self.ends: list[float] = []

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.ends.append(time.perf_counter())

        timer = Timer()

        def block() -> float:
            steps = BLOCK + LEFT_OUT
            model.fit(batches, steps_per_epoch=steps, verbose=0, shuffle=False, callbacks=[*callbacks, timer])
            return BLOCK * GLOBAL_BATCH / (timer.ends[-1] - timer.ends[LEFT_OUT - 1])

        return block

    def stock(shares: list[int]) -> Callable[[], float]:
        mine = tuple(a[hvd.rank() :: hvd.size()] for a in arrays)
        batches = tf.data.Dataset.from_tensor_slices(mine).shuffle(len(mine[0]), seed=0).repeat()
        batches = batches.batch(shares[hvd.rank()]).prefetch(tf.data.AUTOTUNE)
        first = stock_hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        return blocks(network(stock_hvd.DistributedOptimizer(sgd())), batches, [first])

    def balanced() -> Callable[[], float]:
        balance = LoadBalance("lb-bsp", global_batch=GLOBAL_BATCH)
        return blocks(network(sgd()), resize_batches(arrays, balance, shuffle=True).repeat(), [balance])

    def true_shares() -> list[int]:
        """Return the split by each rank's speed alone, on equal batches."""
        model = network(sgd())
        share = GLOBAL_BATCH // hvd.size()
        seconds = []
        for _ in range(8):
            began = time.perf_counter()
            model.train_on_batch(arrays[0][:share], arrays[1][:share])
            seconds.append(time.perf_counter() - began)
        hvd.allreduce(tf.zeros(1), name="all have measured")
        speeds = hvd.allgather_object(share / float(np.median(seconds[2:])), name="speeds")
        return [int(n) for n in proportional(speeds, GLOBAL_BATCH)]

    described = hvd.allgather_object(slowness.describe(), name="slowness")
    with slowness:
        split = true_shares()
        schemes = {
            "stock": stock([GLOBAL_BATCH // hvd.size()] * hvd.size()),
            "oracle": stock(split),
            "LB-BSP": balanced(),
        }
        for block in schemes.values():
            block()
        found: dict[str, list[float]] = {name: [] for name in schemes}
        for cycle in range(cycles):
            for name in list(schemes) if cycle % 2 == 0 else list(schemes)[::-1]:
                hvd.allreduce(tf.zeros(1), name="turn")
                found[name].append(schemes[name]())
                if hvd.rank() == 0:
                    print(name, flush=True)
    report({"found": found, "split": split, "slowness": described})


def main() -> int:
    from _report import write_result

    from hvd_hetero.testing import KEEP_MEMORY, launch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=8, help="blocks of each scheme (default 8)")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    examples = str(Path(__file__).resolve().parents[1] / "examples")
    env = KEEP_MEMORY | {"PYTHONPATH": examples, "TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    rows = [
        "Samples per second of LB-BSP on tf_keras, two ranks, one of them slowed down; alternating blocks of one run.",
        "",
        "| slower | times stock | quartiles | target | of the oracle | quartiles | target |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    missed, notes = [], []
    with Progress() as progress:
        for slow, least in SLOW.items():
            task = progress.add_task(f"{slow:g} times slower", total=3 * options.cycles)
            outcome = launch(
                __file__, 2, [slow, options.cycles], timeout_s=580, env=env,
                on_line=lambda rank, line, task=task: progress.advance(task),
            ).reports[0]  # fmt: skip
            found = outcome["found"]
            cells = [f"{slow:g}"]
            for other, target in (("stock", least), ("oracle", OF_ORACLE)):
                low, middle, high = statistics.quantiles(
                    [a / b for a, b in zip(found["LB-BSP"], found[other], strict=True)], n=4
                )
                cells += [f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{target}"]
                if middle < target:
                    missed.append(f"{slow:g} times slower: {middle:.3f} of {other}, at least {target}")
            rows.append(f"| {' | '.join(cells)} |")
            notes.append(f"{slow:g} times slower: the oracle's split is {outcome['split']}; {outcome['slowness'][-1]}.")
    text = "\n".join([*rows, "", *notes, "", f"Missed: {'; '.join(missed) or 'nothing'}."])
    print(text)
    if options.write:
        write_result("speed_keras", text)
    return 1 if missed else 0


if __name__ == "__main__":
    import sys

    if "HOROVOD_RANK" in os.environ:
        rank_main(float(sys.argv[1]), int(sys.argv[2]))
    else:
        raise SystemExit(main())
