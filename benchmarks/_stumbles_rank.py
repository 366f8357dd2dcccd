"""One rank of `stumbles.py`: two policies train in turns, and each is compared with one process at the end."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

import horovod.torch as hvd
import numpy as np
import torch
from torch.nn import functional

from hvd_hetero.rounds import FinishedRound
from hvd_hetero.testing import report
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

PER_RANK, SAMPLES, FEATURES, RATE = 96, 2011, 8, 0.05
STUMBLES, MOST = 0.1, 4.0
REMEMBERED = 15  # micro-batches


class Training:
    """A user's loop under one policy, whose computing is a sleep that stumbles.

    A micro-batch takes what is declared, from its arrival to its last gradient. The real passes and late wake-ups are
    within: a sleep is shorter by the median of the excess of the last few, or each would cost 2 ms more.
    """

    def __init__(
        self, policy: str, factor: float, sample_s: float, fixed_s: float, seed: int, samples: int = SAMPLES
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
        self.y = torch.sin(self.x.sum(1, keepdim=True))
        self.model = torch.nn.Linear(FEATURES, 1, dtype=torch.float64)
        self.balance = LoadBalance(policy, global_batch=PER_RANK * hvd.size())
        self.finished: list[FinishedRound] = []
        self.balance._session.balancer.observer = self.finished.append
        self.seen: list[list[int]] = []
        self.start: torch.Tensor | None = None
        self.computing_s = self.ending_s = 0.0
        """Seconds from batch to last gradient, as declared; and from a round's last gradient to its update's end."""
        self.turns_s = 0.0
        self.samples = self.micro_batches = 0
        self._besides: deque[float] = deque([0.0], maxlen=REMEMBERED)
        self._factor, self._sample_s, self._fixed_s = factor, sample_s, fixed_s
        self._chance = np.random.Generator(np.random.PCG64([seed, hvd.rank()]))
        self._loader = BalancedLoader(range(samples), self.balance, shuffle=True, seed=0)
        sgd = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self._optimizer = DistributedOptimizer(sgd, self.balance, self.model.named_parameters())

    def _train(self) -> None:
        """Train until the loader stops, or the epoch is over."""
        for index in self._loader:
            if self.start is None:
                self.start = self._flat()
            began = time.perf_counter()
            done = self.balance.rounds
            self.seen += [[] for _ in range(done + 1 - len(self.seen))]  # in some this rank may have had nothing
            self.seen[done] += index.tolist()
            self._optimizer.zero_grad()
            declared_s = self._factor * self._stumble() * (self._sample_s * len(index) + self._fixed_s)
            sleep_s = max(declared_s - statistics.median(self._besides), 0.0)
            time.sleep(sleep_s)
            functional.mse_loss(self.model(self.x[index]), self.y[index]).backward()
            computed = time.perf_counter()
            self._optimizer.step()
            self._besides.append(computed - began - sleep_s)
            self.computing_s += declared_s
            self.samples += len(index)
            self.micro_batches += 1
            if self.balance.rounds > done:
                self.ending_s += time.perf_counter() - computed

    def _stumble(self) -> float:
        """Return how many times as long the next micro-batch takes."""
        return self._chance.uniform(1.0, MOST) if self._chance.random() < STUMBLES else 1.0

    def turn(self, rounds: int) -> float:
        """Train so many rounds and return samples per second."""
        hvd.allreduce(torch.zeros(1), name="turn")
        first, began = len(self.finished), time.perf_counter()
        self._loader.stop_at = self.balance.rounds + rounds  # for ranks that had nothing in the last round, too
        while self.balance.rounds < self._loader.stop_at:
            self._train()
        seconds = time.perf_counter() - began
        self.turns_s += seconds
        return sum(finished.table.total for finished in self.finished[first:]) / seconds

    def warm_up(self, rounds: int) -> None:
        """Train so many rounds that do not count."""
        self.turn(rounds)
        self.turns_s = self.computing_s = self.ending_s = 0.0
        self.samples = self.micro_batches = 0

    def account(self) -> dict[str, float]:
        """Return where the time went, in the mean over the ranks, and the samples per second that none exceeds.

        A rank that did nothing but compute, with the stumbles that it met, would do samples / computing_s: the sum over
        the ranks bounds every rule by which a round ends.
        """
        mine = (self.computing_s, self.ending_s, self.turns_s, self.samples, self.micro_batches)
        computing, ending, turns, samples, micro_batches = np.array(hvd.allgather_object(mine)).T
        other = turns - computing - ending
        return {
            "bound": float((samples / computing).sum()),
            "computing": float((computing / turns).mean()),
            "ending": float((ending / turns).mean()),
            "other": float((other / turns).mean()),
            "other_ms": float(1e3 * (other / micro_batches).mean()),
        }

    def outcome(self) -> dict:
        """Compare the parameters with one process's on the samples really used, and count the samples."""
        assert self.start is not None, "no round was trained"
        self.seen += [[] for _ in range(len(self.finished) - len(self.seen))]
        rounds = [[i for part in parts for i in part] for parts in zip(*hvd.allgather_object(self.seen), strict=True)]
        alone = torch.nn.Linear(FEATURES, 1, dtype=torch.float64)
        torch.nn.utils.vector_to_parameters(self.start, alone.parameters())
        sgd = torch.optim.SGD(alone.parameters(), lr=RATE)
        for index in rounds:
            sgd.zero_grad()
            functional.mse_loss(alone(self.x[index]), self.y[index]).backward()
            sgd.step()
        expected = torch.nn.utils.parameters_to_vector(alone.parameters()).detach()
        of_epoch: dict[int, list[int]] = {}
        for finished, index in zip(self.finished, rounds, strict=True):
            of_epoch.setdefault(finished.epoch, []).extend(index)
        whole = [sorted(visited) == list(range(len(self.x))) for _, visited in sorted(of_epoch.items())[:-1]]
        return {
            "difference": float((self._flat() - expected).abs().max() / expected.abs().max()),
            "epochs": len(whole),
            "each_once": all(whole),
            "micro_batches": statistics.mode(f.plan.micro_batches[0] for f in self.finished[len(self.finished) // 2 :]),
        }

    def _flat(self) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policies", nargs=2, required=True)
    parser.add_argument("--factors", type=float, nargs="+", required=True)
    parser.add_argument("--sample-ms", type=float, required=True)
    parser.add_argument("--fixed-ms", type=float, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    factor, sample_s, fixed_s = options.factors[hvd.rank()], options.sample_ms / 1e3, options.fixed_ms / 1e3
    trainings = {name: Training(name, factor, sample_s, fixed_s, options.seed) for name in options.policies}
    for training in trainings.values():
        training.warm_up(options.warm_up)
    rates: dict[str, list[float]] = {name: [] for name in trainings}
    for pair in range(options.pairs):
        for name in options.policies[:: 1 if pair % 2 else -1]:
            rates[name].append(trainings[name].turn(options.rounds))
    report({name: t.outcome() | t.account() | {"rates": rates[name]} for name, t in trainings.items()})


if __name__ == "__main__":
    main()
