"""One rank of `benchmarks/commit_cost.py`, PyTorch: train a large model, and time commits and rounds by turns."""

from __future__ import annotations

import json
import sys

import horovod.torch as hvd
import torch
from _commit_cost import LAYERS, ROUNDS, WARM_UP, Timed, width_of
from torch.utils.data import TensorDataset

from hvd_hetero.testing import report
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance
from torch_hooks.elastic import TorchState


def main() -> None:
    job = json.loads(sys.argv[1])
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    width = width_of(job["parameters"])
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    told = {}
    for chosen, rounds in ((2, job["rounds"] + WARM_UP), ("auto", ROUNDS)):
        data = TensorDataset(torch.randn(rounds * hvd.size(), width))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        state = TorchState(model, optimizer, rounds_per_commit=chosen)
        timed = Timed(state, lambda state=state: [part.state_dict() for part in (model, state.optimizer)])
        timed.copies = chosen == 2
        train(state, timed, data)
        told[str(chosen)] = timed.told()
    report({**told, "parameters": sum(parameter.numel() for parameter in model.parameters())})


@hvd.elastic.run
def train(state: TorchState, timed: Timed, data: TensorDataset) -> None:
    balance = LoadBalance("bsp", global_batch=hvd.size())
    loader = BalancedLoader(data, balance)
    optimizer = DistributedOptimizer(state.optimizer, balance, state.model.named_parameters())
    state.follow(balance, loader)
    for (x,) in loader:
        timed.begin()
        optimizer.zero_grad()
        state.model(x).square().mean().backward()
        optimizer.step()
        timed.end()
    optimizer.close()
    balance.close()


if __name__ == "__main__":
    main()
