"""One rank of the demo (see ``demo.py``): the same training three times, on ranks of unequal speed.

First BSP and then LB-BSP, both by hvd-hetero. The oracle is stock Horovod with the split that a person would set by
hand from the ranks' speeds. It trains one half before LB-BSP and the other after it, so that a machine that changes its
pace favours neither. Rank 0 prints one JSON object per line, which the demo's front draws as progress.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import demo_data
import horovod.torch as hvd
import torch
from demo_data import CLASSES, LEARNING_RATE, MOMENTUM, SEED, SIDE, TEST_SAMPLES, WARM_UP_ROUNDS
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hvd_hetero.telemetry import read_run
from hvd_hetero.testing import SlowDown, pin_to_core, slow_down
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance


def images(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pictures of ten classes, as tensors."""
    x, labels = demo_data.images(count, seed)
    return torch.from_numpy(x), torch.from_numpy(labels)


def network(seed: int = SEED) -> torch.nn.Module:
    """Return a small convolutional network, with the same weights on every call."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(32, 96, 3, padding=1), torch.nn.ReLU(),
        torch.nn.Conv2d(96, 96, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(96 * (SIDE // 4) ** 2, CLASSES),
    )  # fmt: skip


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


class Pace:
    """Gradients at the pace of a slow rank: it sleeps between the forward and the backward pass. One per training.

    If no processor quota can be set, a rank f times slower must take f c seconds for c seconds of a core's work. If it
    waited w seconds for a core that it shares with another rank, it was slow for that long already:

        slept_s = (f - 1) c - w.

    c is processor time of this thread, which also runs PyTorch's backward pass on a CPU. With wall time instead, two
    ranks on one core would each pay for the other.

    It pays for the forward pass just done, and for the coming backward pass at the last price per sample; the next step
    corrects the difference. Prices differ between trainings.
    """

    def __init__(self, slowness: SlowDown) -> None:
        self._slowness = slowness
        self._owed_s = 0.0
        self._backward_s_per_sample = 0.0

    def gradient(
        self, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, scale: Callable[[Any], Any] = lambda loss: loss
    ) -> None:
        """Add the gradient of the mean loss, or of what ``scale`` makes of it."""
        began = self._now()
        loss = scale(functional.cross_entropy(model(x), y))
        expected_s = self._backward_s_per_sample * len(x)
        self._sleep(self._price_s(began) + expected_s)
        began = self._now()
        loss.backward()
        price_s = self._price_s(began)
        self._owed_s += price_s - expected_s
        self._backward_s_per_sample = price_s / len(x)

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.thread_time()

    def _price_s(self, began: tuple[float, float]) -> float:
        wall_s, busy_s = (now - then for now, then in zip(self._now(), began, strict=True))
        return self._slowness.factor * busy_s - wall_s

    def _sleep(self, seconds: float) -> None:
        if self._slowness.factor == 1:
            self._owed_s = 0.0
            return
        self._owed_s += seconds
        # `after_compute` takes work, not a wait: for this much work it sleeps exactly what is owed.
        self._slowness.after_compute(max(self._owed_s, 0.0) / (self._slowness.factor - 1))
        # A credit counts for the next step only, or a rank that waited long would run at full speed later.
        self._owed_s = max(min(self._owed_s, 0.0), -abs(seconds))


class Rank:
    """Parts that the phases share: the data, this rank's slowness, and progress."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.data = TensorDataset(*images(demo_data.training_samples(options.global_batch), seed=2))
        self.test = images(TEST_SAMPLES, seed=3)
        slow = hvd.rank() == hvd.size() - 1
        self.slowness = slow_down(options.slow if slow else 1.0)

    def say(self, **event: object) -> None:
        if hvd.rank() == 0:
            print(json.dumps(event), flush=True)

    def finish(self, phase: str, model: torch.nn.Module, samples_per_s: float) -> None:
        """Report throughput after the warm-up, and loss on unseen data."""
        with torch.no_grad():
            loss = functional.cross_entropy(model(self.test[0]), self.test[1]).item()
        self.say(phase=phase, loss=loss, samples_per_s=samples_per_s)
        hvd.allreduce(torch.zeros(1), name=f"end of {phase}")

    def balanced(self, policy: str) -> None:
        """Train as a user of hvd-hetero does."""
        options = self.options
        model, pace = network(), Pace(self.slowness)
        telemetry = options.out / f"{policy}.jsonl"
        balance = LoadBalance(policy, global_batch=options.global_batch, telemetry=telemetry)
        loader = BalancedLoader(self.data, balance, shuffle=True, seed=SEED, stop_at=options.rounds)
        optimizer = DistributedOptimizer(sgd(model), balance, model.named_parameters())
        while options.rounds is None or balance.rounds < options.rounds:
            began, before = time.perf_counter(), balance.rounds
            for x, y in loader:
                optimizer.zero_grad()
                pace.gradient(model, x, y)
                optimizer.step()
                self.say(phase=policy, round=balance.rounds, batch=balance.plan)
            if options.rounds is None:  # the first epoch shows the machine's pace
                round_s = (time.perf_counter() - began) / (balance.rounds - before)
                rounds = max(demo_data.affordable_rounds(round_s, options.slow), balance.rounds)
                options.rounds = loader.stop_at = hvd.broadcast_object(rounds, root_rank=0, name="rounds")
                self.say(rounds=options.rounds)
        balance.close()
        warm = read_run(telemetry).after(WARM_UP_ROUNDS) if hvd.rank() == 0 else None
        self.finish(policy, model, warm.throughput if warm else math.nan)

    def oracle(self) -> Iterator[None]:
        """Train with stock Horovod and a split set by hand from the speeds under BSP, pausing half-way."""
        options = self.options
        # Named, because Horovod names an object after its type, and None has another type than a list.
        split = demo_data.hand_set_split(options) if hvd.rank() == 0 else None
        shares = hvd.broadcast_object(split, root_rank=0, name="shares")
        lists = demo_data.hand_set_batches(options, shares, hvd.rank())
        model, pace = network(), Pace(self.slowness)
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), op=hvd.Sum)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        half = options.rounds // 2
        measured = 0
        seconds = 0.0
        for first, end in ((0, half), (half, options.rounds)):
            began = time.perf_counter()
            loader = DataLoader(self.data, batch_sampler=lists[first:end])
            for done, (x, y) in enumerate(loader, start=1):
                optimizer.zero_grad()
                pace.gradient(model, x, y, scale=partial(torch.mul, len(x) / options.global_batch))
                optimizer.step()
                if done == WARM_UP_ROUNDS:
                    began = time.perf_counter()
                self.say(phase="oracle", round=first + done, batch=shares)
            measured += end - first - WARM_UP_ROUNDS
            seconds += time.perf_counter() - began
            if first == 0:
                yield
        self.finish("oracle", model, measured * options.global_batch / seconds)


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    pin_to_core(hvd.rank())
    rank = Rank(demo_data.rank_options())
    described = hvd.allgather_object(rank.slowness.describe())
    rank.say(slowness=described)
    with rank.slowness:
        rank.balanced("bsp")
        oracle = rank.oracle()
        next(oracle)
        rank.balanced("lb-bsp")
        for _ in oracle:
            raise AssertionError("the oracle has two halves")


if __name__ == "__main__":
    main()
