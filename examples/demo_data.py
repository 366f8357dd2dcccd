"""Parts of the demo that both frameworks share: pictures, hyper-parameters, the oracle's split, the check of losses."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hvd_hetero.allocation import proportional
from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.rounds import RoundPlan
from hvd_hetero.telemetry import read_run

CLASSES, SIDE = 10, 32
TRAIN_SAMPLES, TEST_SAMPLES = 2560, 512
NOISE = 3.5
WARM_UP_ROUNDS = 5
SEED = 0
ROUNDS, GLOBAL_BATCH = 120, 128
LEAST_ROUNDS, TRAINING_S = 30, 60.0
"""Of each training at least, and of the three together about, where the number of rounds is not given."""

# A rate three times as high still trains, but close to the edge of stability rounding decides whether a training
# succeeds. Policies would then end at different losses for no reason in themselves (benchmarks/demo_losses.py).
LEARNING_RATE, MOMENTUM = 0.01, 0.9
LEARNT = 0.2
"""Loss that every seed stays below after ROUNDS rounds of GLOBAL_BATCH samples; chance is ln 10 = 2.30."""
LEARNS = 2.2
"""The same after LEAST_ROUNDS rounds, where three seeds had 1.81 to 2.06."""
SPREAD = 0.03
"""Range of the loss over twenty seeds, rounded up."""


def images(count: int, seed: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return pictures of ten classes: a smooth pattern per class, shifted at random, with noise of variance 1."""
    rng = np.random.default_rng(1)
    waves = rng.normal(size=(CLASSES, 3, 4, 4)) / 3
    grid = np.arange(SIDE) * 2 * np.pi / SIDE
    basis = np.stack([np.sin(grid), np.cos(grid), np.sin(2 * grid), np.cos(2 * grid)])
    patterns = np.einsum("kcij,ix,jy->kcxy", waves, basis, basis)
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=count)
    shifts = rng.integers(-2, 3, size=(count, 2))
    x = np.stack([np.roll(patterns[k], s, axis=(1, 2)) for k, s in zip(labels, shifts, strict=True)])
    return (x / NOISE + rng.normal(size=x.shape)).astype(np.float32), labels


def training_samples(global_batch: int) -> int:
    """Return the number of samples to train on, so that no round is short."""
    return math.ceil(TRAIN_SAMPLES / global_batch) * global_batch


def rank_options() -> argparse.Namespace:
    """Return the settings that the demo's front passes to a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow", type=float, required=True)
    parser.add_argument("--rounds", type=int, help="all that the time allows if not given")
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def affordable_rounds(round_s: float, slow: float) -> int:
    """Return how many rounds of each training take about a minute in all, where a round of BSP takes ``round_s``.

    Of two ranks, one s times slower than the other, balanced rounds take 2 / (1 + s) of that. Two trainings have them.
    """
    return max(LEAST_ROUNDS, min(ROUNDS, int(TRAINING_S / (round_s * (1 + 4 / (1 + slow))))))


def hand_set_split(options: argparse.Namespace) -> list[int]:
    """Return the split that a person would set by hand from the ranks' speeds under BSP."""
    run = read_run(options.out / "bsp.jsonl").after(WARM_UP_ROUNDS)
    speeds = np.median(run.samples / (run.compute_s + run.input_s), axis=0)
    return [int(x) for x in proportional(speeds, options.global_batch)]


def hand_set_batches(options: argparse.Namespace, shares: list[int], rank: int) -> list[list[int]]:
    """Return the indices of this rank's batches under a split, with the samples and order of the other trainings."""
    order = SharedPermutation(training_samples(options.global_batch), shuffle=True, seed=SEED)
    plan = RoundPlan.of(shares)
    lists: list[list[int]] = []
    while len(lists) < options.rounds:
        if order.remaining == 0:
            order.start(order.epoch + 1)
        lists.append(order.take(plan, rank).part.tolist())
        order.finish(shares)
    return lists


def judge(losses: Mapping[str, float], rounds: int, global_batch: int) -> tuple[bool, str]:
    """Return whether the trainings reached the same loss, low if they were long enough, with a sentence about it."""
    each = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
    apart = float(np.ptp(list(losses.values())))  # NaN if one is
    if not apart <= SPREAD:
        return False, (
            f"The final losses differ: {each}. All three train on the same samples in the same order, and may differ "
            f"by {SPREAD:g}, as seeds do. Run it again, and report it if it stays so."
        )
    most = LEARNT if rounds >= ROUNDS else LEARNS
    if rounds >= LEAST_ROUNDS and global_batch >= GLOBAL_BATCH and not max(losses.values()) <= most:
        return False, f"The network has not learnt: {each}. Every loss must be at most {most:g} after {rounds} rounds."
    return True, (
        f"The final losses are {apart:.4f} apart; seeds differ by {SPREAD:g}. All three trained on the same samples in "
        f"the same order. Guessing gives {math.log(CLASSES):.2f}, and {ROUNDS} rounds give below {LEARNT:g}."
    )
