"""Overhead of balancing between distant hosts: the step time over stock Horovod's, at a round trip of 10 ms.

    sudo python benchmarks/round_trip.py [--write] [--pairs N] [--only FRAMEWORK ...]

Two ranks, each pinned to a core, run on two hosts: network namespaces between which every packet takes half of the
round trip (`hvd_hetero.testing.Hosts`, which needs root). The table has the round trip that TCP measures. A step of
stock Horovod is then mostly waiting for collectives. One more collective that is not fused costs one or two round
trips, a quarter of a short step.

As in ``overhead_torch.py`` and ``overhead_keras.py``, stock Horovod, BSP and LB-BSP train the same network in
alternating blocks of one run. Each block of ours and its neighbour of stock give one ratio of median step times; the
table has the median of these ratios of both ranks, its error and the quartiles. No absolute time is a result.

Shares are even, or uneven: five eighths of the global batch on rank 0. Uneven shares are set by hand, for stock Horovod
by each rank's batch size. LB-BSP measures, predicts and plans in every round, but its plan is not followed, because on
equal ranks it would restore even shares. (Stock Horovod averages over ranks, not over samples, so with uneven shares it
trains something else, in the same time.)

The networks are dense, in PyTorch and in Keras (a loop around a gradient tape, on tf_keras, where Horovod's own tape
works; each ``fit`` would begin with seconds of broadcasts at this delay). Layers are narrow, because the links
have no limit of bandwidth here. With 32 samples per rank a step computes for some milliseconds, and all gradients fall
into few cycles of Horovod's thread; with 512 the backward pass outlasts several cycles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from _alternating import STOCK, STOCK_S, Blocks, alternate
from _report import error_of_median, write_result
from rich.progress import Progress

ROUND_TRIP_S = 0.01
KINDS = ("bsp", "lb-bsp")
SHARES = {"even": (4, 4), "uneven": (5, 3)}  # eighths of the global batch
BLOCK = 8
LEFT_OUT = 1  # of Keras, at the start of each block
ROUNDS = 32  # of an epoch in Keras
TARGET = 1.05
MTU = 65000  # large packets: each costs a processor as much as some kilobytes
FRAMEWORKS = {"torch": "PyTorch", "keras": "Keras"}
NETWORKS = {  # parameter tensors, width of the layers, global batch
    "10 tensors": (10, 128, 64),
    "100 tensors": (100, 64, 64),
    "100 tensors, long": (100, 64, 1024),
}
PAIR_DONE = "pair done"


def samples_of(name: str, shares: str) -> tuple[int, ...]:
    """Return the samples of each rank in a round."""
    return tuple(eighths * NETWORKS[name][2] // 8 for eighths in SHARES[shares])


def policies_of(samples: tuple[int, ...]) -> dict[str, Any]:
    """Return the compared policies, which keep these shares."""
    if len(set(samples)) == 1:
        return dict(zip(KINDS, KINDS, strict=True))
    from hvd_hetero.policies import BSP, LBBSP
    from hvd_hetero.rounds import FinishedRound, RoundPlan

    class Kept:
        """LB-BSP that makes its plans but keeps the given shares."""

        def first(self, workers: int, global_batch: int) -> RoundPlan:
            super().first(workers, global_batch)  # type: ignore[misc]
            return RoundPlan.of(samples)

        def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
            super().next(plan, finished)  # type: ignore[misc]
            return plan

    class KeptBSP(Kept, BSP):
        pass

    class KeptLBBSP(Kept, LBBSP):
        pass

    return {"bsp": KeptBSP(), "lb-bsp": KeptLBBSP()}


def rank_main(framework: str, pairs: int, name: str, shares: str) -> None:
    from hvd_hetero.testing import report

    make = {"torch": torch_kinds, "keras": keras_kinds}[framework]
    report(alternate(pairs, PAIR_DONE, make(*NETWORKS[name], samples_of(name, shares)), BLOCK))


def torch_kinds(tensors: int, width: int, global_batch: int, samples: tuple[int, ...]) -> Mapping[str, Blocks]:
    """Return stock Horovod and the policies."""
    import torch
    from overhead_torch import dense, kinds_of

    torch.manual_seed(0)
    batch, own = global_batch // len(samples), samples[int(os.environ["HOROVOD_RANK"])]
    return kinds_of("dense", dense(tensors, batch, width), batch, policies_of(samples), own)


def keras_kinds(tensors: int, width: int, global_batch: int, samples: tuple[int, ...]) -> Mapping[str, Blocks]:
    """Return stock Horovod and the policies."""
    import horovod.tensorflow as hvd
    import numpy as np
    import tensorflow as tf

    from hvd_hetero.testing import pin_to_core
    from keras_callbacks import LoadBalance, resize_batches, weighted_gradients

    keras = tf.keras
    hvd.init()
    pin_to_core(hvd.rank())
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROUNDS * global_batch, width)).astype("float32")
    arrays = x, rng.integers(10, size=len(x))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    class Kind:
        """A training with its own network: equal networks differ little beside a round trip."""

        def __init__(self, balance: LoadBalance | None) -> None:
            keras.utils.set_random_seed(0)
            inputs = hidden = keras.layers.Input((width,))
            for _ in range(tensors // 2):
                hidden = keras.layers.Dense(width, activation="relu")(hidden)
            model, optimizer = keras.Model(inputs, hidden), keras.optimizers.SGD(1e-3, momentum=0.9)
            optimizer.build(model.trainable_variables)
            self._batches = self._stock() if balance is None else self._balanced(balance, model, optimizer)

            @tf.function(reduce_retracing=True)
            def step(x: Any, y: Any) -> None:
                variables = model.trainable_variables
                with tf.GradientTape() as tape:
                    loss = loss_of(y, model(x, training=True))
                if balance is None:
                    gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
                else:
                    gradients = weighted_gradients(tape, loss, variables, balance)
                optimizer.apply_gradients(zip(gradients, variables, strict=True))

            self._step = step

        def _stock(self) -> Iterator[Any]:
            mine = tuple(a[hvd.rank() :: hvd.size()] for a in arrays)
            batches = tf.data.Dataset.from_tensor_slices(mine).shuffle(len(mine[0]), seed=0).repeat()
            return iter(batches.batch(samples[hvd.rank()]).prefetch(tf.data.AUTOTUNE))

        def _balanced(self, balance: LoadBalance, model: Any, optimizer: Any) -> Iterator[Any]:
            balance.start(model, optimizer)
            data = resize_batches(arrays, balance, shuffle=True)
            while True:
                yield from balance.batches(data)

        def block(self, steps: int) -> float:
            took = []
            for _ in range(LEFT_OUT + steps):
                began = time.perf_counter()
                self._step(*next(self._batches))
                took.append(time.perf_counter() - began)
            return statistics.median(took[LEFT_OUT:])

    policies = policies_of(samples)
    balances = {kind: LoadBalance(policy, global_batch=global_batch) for kind, policy in policies.items()}
    return {STOCK: Kind(None)} | {kind: Kind(balance) for kind, balance in balances.items()}


def row(framework: str, name: str, shares: str, found: Mapping[str, list[float]]) -> str:
    """Return a line of the table."""
    sizes = "/".join(map(str, samples_of(name, shares)))
    cells = [f"{FRAMEWORKS[framework]}, {name.removesuffix(', long')}", f"{shares}, {sizes}"]
    for kind in KINDS:
        low, middle, high = statistics.quantiles(found[kind], n=4)
        error = error_of_median(found[kind], len(found[kind]) // 2)
        cells += [f"{middle:.3f}", f"{error:.3f}", f"{low:.3f} to {high:.3f}"]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    from _round_trip import round_trip_s
    from _support import Hosts, hosts_available

    from hvd_hetero.testing import KEEP_MEMORY, launch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="blocks of each kind per row (default 20)")
    parser.add_argument("--only", nargs="+", choices=list(FRAMEWORKS), default=list(FRAMEWORKS), help="one framework")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("--pairs must be at least 2: fewer have no quartiles")
    if not (support := hosts_available()):
        parser.error(support.why)
    rows, worst = [], 0.0
    env = KEEP_MEMORY | {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    env["PYTHONPATH"] = str(Path(__file__).resolve().parents[1] / "examples")
    cases = [(f, n, s) for f in options.only for n in NETWORKS for s in SHARES]
    with Hosts(2, delay_s=ROUND_TRIP_S / 2, mtu=MTU) as hosts, Progress() as progress:
        reached_s = round_trip_s(hosts)
        progress.console.print(f"round trip: {1e3 * reached_s:.1f} ms")
        tasks = {case: progress.add_task(" ".join(case), total=options.pairs) for case in cases}
        for case, task in tasks.items():
            framework, name, shares = case
            result = launch(
                __file__, 2, [framework, options.pairs, name, shares], timeout_s=120 + 20 * options.pairs, env=env,
                starter=hosts.horovodrun(),
                on_line=lambda rank, line, task=task: progress.advance(task) if line == PAIR_DONE else None,
            )  # fmt: skip
            found = {kind: [r for rank in result.reports for r in rank[kind]] for kind in result.reports[0]}
            rows.append(row(framework, name, shares, found))
            worst = max(worst, *(statistics.median(found[kind]) for kind in KINDS))
            step_s = statistics.median(found[STOCK_S])
            progress.console.print(f"{rows[-1]} (a step of stock Horovod's took {1e3 * step_s:.1f} ms)", soft_wrap=True)
    verdict = "met" if worst <= TARGET else "**missed**"
    text = "\n".join([
        f"Step time over stock Horovod's at a round trip of {1e3 * reached_s:.1f} ms; two ranks, alternating blocks of "
        f"one run, {options.pairs} pairs a row.",
        "",
        "| network | shares, samples | BSP (median) | error | quartiles | LB-BSP (median) | error | quartiles |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *rows,
        "",
        f"Target: at most {TARGET} in each row; the largest is {worst:.3f}: {verdict}.",
    ])  # fmt: skip
    print(text)
    if options.write:
        write_result("round_trip", text)
    return 0 if worst <= TARGET else 1


if __name__ == "__main__":
    import sys

    if "HOROVOD_RANK" in os.environ:
        rank_main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        raise SystemExit(main())
