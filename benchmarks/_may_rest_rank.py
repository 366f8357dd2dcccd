"""One rank of `benchmarks/may_rest.py --ranks`: train with one policy after the other, report samples per second."""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import TensorDataset

from hvd_hetero.policies import LBBSP, Policy, StaticAllocation
from hvd_hetero.testing import report
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

BATCH, SAMPLE_S, FEATURES = 64, 5e-4, 16


class Sleeps(torch.nn.Linear):
    """A layer that takes so long for each sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__(FEATURES, FEATURES)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(x))
        return super().forward(x)


def pace(policy: Policy, seconds: float, rounds: int, start: int) -> float:
    """Return the samples per second of a training, without its first rounds."""
    torch.manual_seed(1)
    model = Sleeps(seconds)
    balance = LoadBalance(policy, global_batch=BATCH)
    loader = BalancedLoader(TensorDataset(torch.randn(BATCH * rounds, FEATURES)), balance)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), balance, model.named_parameters())
    began_at = [time.perf_counter()] * 2
    balance.on_round(lambda record: record["round"] == start and began_at.append(time.perf_counter()))
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    done_at = time.perf_counter()
    balance.close()
    return BATCH * (rounds - start - 2) / (done_at - began_at[-1])  # a record comes a round late


def main() -> None:
    speeds, rounds, start = [float(of) for of in sys.argv[1].split(":")], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    seconds = SAMPLE_S / speeds[rank]
    policies = {
        "all": LBBSP(),
        "may rest": LBBSP(may_rest=True),
        "without": StaticAllocation([1, *[0] * (len(speeds) - 1)]),
    }
    report({name: pace(policy, seconds, rounds, start) for name, policy in policies.items()})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
