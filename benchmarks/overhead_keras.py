"""Overhead of LB-BSP in Keras: the step time on equal ranks, over stock Horovod's.

    python benchmarks/overhead_keras.py [--write] [--only NAME ...] [--batch SAMPLES]
    python benchmarks/overhead_keras.py --short [--write]

As in ``overhead_torch.py``, two ranks, each pinned to a core, train the same network with stock Horovod and with
LB-BSP, in alternating blocks of rounds of one run. Each pair of neighbouring blocks gives one ratio of median step
times, and the table has the median of these ratios and their quartiles. There are two trainings of each kind, because
equal ones differ in pace by where their memory lies.

All runs use tf_keras, where Horovod's own optimizer for Keras works. It is compiled into the model, which ``fit``
trains on a tf.data pipeline that batches a shard of the arrays, as Keras users write it. A block is one call of
``fit``. A step is timed from the end of the previous one, so it includes fetching and callbacks; the first steps of a
block do not count. No absolute time is a result.

The networks are the demo's convolutional one, and dense ones of 10 and 100 parameter tensors. Balancing costs the same
for any batch, so the ratio is less favourable with fewer samples. As in ``overhead_torch.py``, the table has 256
samples per rank, a step of a tenth or two of a second, and a quarter of it in the convolutional network. ``--batch 64``
measures dense steps of a twentieth of a second, into a separate table. ``--short`` is for steps of some milliseconds: a
dense network of four layers with few samples, whose target is looser.

A median whose error is above half a per cent and which is less than two errors from the target is undecided, as in
``overhead_torch.py``; the command then exits with 1, as where the target is missed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import Progress

USUAL = 256  # samples per rank
BLOCK = 20
LEFT_OUT = 4  # rounds at the start of each fit
ROUNDS = 32  # of an epoch
TARGET = 1.02
PAIRS = 24
ERROR = 0.005  # of a median that decides, as in overhead_torch.py
NETWORKS = ("convolutional", "10 tensors", "100 tensors")
SHORT = {"8 tensors": 128}  # and its samples per rank
SHORT_TARGET = 1.05


def samples_of(name: str, batch: int) -> int:
    return SHORT.get(name, batch // 4 if name == "convolutional" else batch)


def rank_main(pairs: int, name: str, batch: int) -> None:
    import demo_data
    import demo_rank_keras
    import horovod.tensorflow as hvd
    import horovod.tensorflow.keras as stock_hvd
    import numpy as np
    import tensorflow as tf

    from hvd_hetero.testing import pin_to_core, report
    from keras_callbacks import LoadBalance, resize_batches

    keras = tf.keras
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def make() -> tuple[Any, tuple[np.ndarray, np.ndarray]]:
        """Return the network and its data; more dense layers are narrower, so that a step stays short."""
        keras.utils.set_random_seed(0)
        if name == "convolutional":
            x, y = demo_data.images(ROUNDS * hvd.size() * batch, seed=2)
            return keras.Model(*demo_rank_keras.layers()), (np.ascontiguousarray(x.transpose(0, 2, 3, 1)), y)
        tensors = int(name.split()[0])
        width = {8: 256, 10: 1024, 100: 256}[tensors]
        inputs = hidden = keras.layers.Input((width,))
        for _ in range(tensors // 2):
            hidden = keras.layers.Dense(width, activation="relu")(hidden)
        rng = np.random.default_rng(1)
        x = rng.normal(size=(ROUNDS * hvd.size() * batch, width)).astype("float32")
        return keras.Model(inputs, hidden), (x, rng.integers(10, size=len(x)))

    class Timer(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

    def blocks(model: Any, batches: Any, callbacks: list[Any]) -> Callable[[], float]:
        """Return a function that trains one more block and returns its median step time."""
        timer = Timer()

        def block() -> float:
            steps = BLOCK + LEFT_OUT
            model.fit(batches, steps_per_epoch=steps, verbose=0, shuffle=False, callbacks=[*callbacks, timer])
            ends = timer.ends[LEFT_OUT - 1 :]
            return statistics.median(b - a for a, b in itertools.pairwise(ends))

        return block

    def sgd() -> Any:
        return keras.optimizers.SGD(1e-3, momentum=0.9)

    def stock() -> Callable[[], float]:
        model, arrays = make()
        model.compile(stock_hvd.DistributedOptimizer(sgd()), loss)
        mine = tuple(a[hvd.rank() :: hvd.size()] for a in arrays)
        batches = tf.data.Dataset.from_tensor_slices(mine).shuffle(len(mine[0]), seed=0).batch(batch)
        first = stock_hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        return blocks(model, batches.repeat().prefetch(tf.data.AUTOTUNE), [first])

    def balanced() -> Callable[[], float]:
        model, arrays = make()
        model.compile(sgd(), loss)
        balance = LoadBalance("lb-bsp", global_batch=batch * hvd.size())
        return blocks(model, resize_batches(arrays, balance, shuffle=True).repeat(), [balance])

    hvd.init()
    pin_to_core(hvd.rank())
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    medians: list[tuple[float, float]] = []
    stocks, ours = [stock()], [balanced(), balanced()]
    stocks.append(stock())
    for run in (*stocks, *ours):
        run()
    for pair in range(pairs):
        runs = stocks[pair % 2], ours[pair % 2]
        # The order within a pair alternates too, so that a drift of the machine favours neither.
        order = (0, 1) if pair % 4 < 2 else (1, 0)
        found = {which: runs[which]() for which in order}
        medians.append((found[0], found[1]))
        if hvd.rank() == 0:
            print(name, flush=True)
    report(medians)


def main() -> int:
    from _report import error_of_median, judged, write_result

    from hvd_hetero.testing import KEEP_MEMORY, launch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"pairs of blocks per network (default {PAIRS})")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="some of the networks")
    which.add_argument("--short", action="store_true", help="one whose steps take some milliseconds, instead")
    parser.add_argument(
        "--batch", type=int, default=USUAL, help=f"samples per rank of dense networks (default {USUAL})"
    )
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    names, target = (list(SHORT), SHORT_TARGET) if options.short else (options.only, TARGET)
    rows = [
        "Step time of LB-BSP over stock Horovod on tf_keras, two equal ranks, alternating blocks of one run.",
        "",
        "| network | pairs | ratio (median) | error | quartiles | ratio on rank 1 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    medians: list[tuple[float, float]] = []
    examples = str(Path(__file__).resolve().parents[1] / "examples")
    env = KEEP_MEMORY | {"PYTHONPATH": examples, "TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    with Progress() as progress:
        tasks = {name: progress.add_task(f"{name:<15}", total=options.pairs) for name in names}
        for name in names:
            samples = samples_of(name, options.batch)
            result = launch(
                __file__, 2, [options.pairs, name, samples], timeout_s=1800, env=env,
                on_line=lambda rank, line: progress.advance(tasks[line]) if line in tasks else None,
            )  # fmt: skip
            ratios, others = ([b / a for a, b in rank] for rank in result.reports)
            low, middle, high = statistics.quantiles(ratios, n=4)
            medians.append((middle, error := error_of_median(ratios, len(ratios))))
            cells = [f"{name}, {samples} samples", f"{len(ratios)}", f"{middle:.3f}", f"{error:.3f}"]
            rows.append(f"| {' | '.join(cells)} | {low:.3f} to {high:.3f} | {statistics.median(others):.3f} |")
    outcome = judged(medians, target, ERROR)
    rows += [
        "",
        f"Target: at most {target} in each row; the largest is {max(medians)[0]:.3f}: {outcome}. Undecided is a median "
        f"with an error above {ERROR} that is less than two errors from the target.",
    ]
    text = "\n".join(rows)
    print(text)
    if options.write:
        kind = "_short" if options.short else "" if options.batch == USUAL else f"_{options.batch}"
        write_result(f"overhead_keras{kind}", text)
    return 0 if outcome == "met" else 1


if __name__ == "__main__":
    import sys

    if "HOROVOD_RANK" in os.environ:
        rank_main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    else:
        raise SystemExit(main())
