"""One rank of `benchmarks/commit_cost.py`: train a large model, and time commits and rounds by turns."""

from __future__ import annotations

import copy
import json
import sys
import time

import horovod.torch as hvd
import torch
from torch.utils.data import TensorDataset

from hvd_hetero.testing import report
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance
from torch_hooks.elastic import TorchState

WARM_UP, LAYERS = 4, 10


def main() -> None:
    job = json.loads(sys.argv[1])
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    width = int((job["parameters"] / LAYERS) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    data = TensorDataset(torch.randn((job["rounds"] + WARM_UP) * hvd.size(), width))
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), rounds_per_commit=2)
    times: dict[str, list[float]] = {"commits_s": [], "rounds_s": [], "deepcopies_s": []}

    def timed_commit() -> None:
        begin_s = time.perf_counter()
        commit()
        times["commits_s"].append(time.perf_counter() - begin_s)
        begin_s = time.perf_counter()
        held = [copy.deepcopy(part.state_dict()) for part in (model, state.optimizer)]
        times["deepcopies_s"].append(time.perf_counter() - begin_s)
        del held

    commit, state.commit = state.commit, timed_commit  # type: ignore[method-assign]

    @hvd.elastic.run
    def train(state: TorchState) -> None:
        balance = LoadBalance("bsp", global_batch=hvd.size())
        loader = BalancedLoader(data, balance)
        optimizer = DistributedOptimizer(state.optimizer, balance, model.named_parameters())
        state.follow(balance, loader)
        for (x,) in loader:
            begin_s = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            times["rounds_s"].append(time.perf_counter() - begin_s)

    train(state)
    told = {name: seconds[WARM_UP // 2 if name != "rounds_s" else WARM_UP :] for name, seconds in times.items()}
    report({**told, "parameters": sum(parameter.numel() for parameter in model.parameters())})


if __name__ == "__main__":
    main()
