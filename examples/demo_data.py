"""What the demo's ranks share, whatever the framework: the pictures, the options, and the split of the oracle."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hvd_hetero.allocation import proportional
from hvd_hetero.telemetry import read_run

CLASSES, SIDE = 10, 32
TRAIN_SAMPLES, TEST_SAMPLES = 2560, 512
WARM_UP_ROUNDS = 5
SEED = 0


def images(count: int, seed: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Generated pictures of ten classes: a smooth pattern per class, shifted at random, under noise."""
    rng = np.random.default_rng(1)
    waves = rng.normal(size=(CLASSES, 3, 4, 4)) / 3
    grid = np.arange(SIDE) * 2 * np.pi / SIDE
    basis = np.stack([np.sin(grid), np.cos(grid), np.sin(2 * grid), np.cos(2 * grid)])
    patterns = np.einsum("kcij,ix,jy->kcxy", waves, basis, basis)
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=count)
    shifts = rng.integers(-2, 3, size=(count, 2))
    x = np.stack([np.roll(patterns[k], s, axis=(1, 2)) for k, s in zip(labels, shifts, strict=True)])
    return (x + rng.normal(scale=4.5, size=x.shape)).astype(np.float32), labels


def rank_options() -> argparse.Namespace:
    """What the demo's front tells a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def hand_set_split(options: argparse.Namespace) -> list[int]:
    """The split that a person would set who knew how fast each rank is: to the speeds that they showed under BSP."""
    run = read_run(options.out / "bsp.jsonl").after(WARM_UP_ROUNDS)
    speeds = np.median(run.samples / (run.compute_s + run.input_s), axis=0)
    return [int(x) for x in proportional(speeds, options.global_batch)]


def hand_set_batches(options: argparse.Namespace, shares: list[int], rank: int) -> list[list[int]]:
    """The indices of this rank's batches under such a split, for as many rounds as the demo has."""
    mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    order = np.random.default_rng(SEED)
    lists: list[list[int]] = []
    while len(lists) < options.rounds:
        epoch = order.permutation(TRAIN_SAMPLES)
        starts = range(0, TRAIN_SAMPLES - options.global_batch + 1, options.global_batch)
        lists += [epoch[s : s + options.global_batch][mine].tolist() for s in starts]
    return lists
