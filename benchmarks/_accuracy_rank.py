"""One rank of `accuracy_torch.py`: scikit-learn's digits under every scheme, from several seeds."""

from __future__ import annotations

import sys
import time

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn import functional

from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, NonBlocking, SelfAdaptive, StaticAllocation
from hvd_hetero.testing import report
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

GLOBAL_BATCH = 48
EPOCHS = 12
PAUSE_S = 3e-5  # a sample, times the rank's number: the ranks are meant to be unequal


class Indexed(torch.utils.data.Dataset):
    """A dataset of indices, so that batches show which samples were visited."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> int:
        return i


def schemes(n: int) -> dict[str, tuple]:
    """Return every policy of the papers with each way of averaging that the papers combine it with."""
    return {
        "bsp": (BSP(), "allreduce"),
        "bsp, d-psgd": (BSP(), "d-psgd"),
        "bsp, matcha": (BSP(), "matcha"),
        "lb-bsp": (LBBSP(), "allreduce"),
        "lb-bsp, d-psgd": (LBBSP(), "d-psgd"),
        "static": (StaticAllocation([4, 2, 1, 1][:n]), "allreduce"),
        "self-adaptive": (SelfAdaptive(3 * n), "allreduce"),
        "non-blocking": (NonBlocking(4), "allreduce"),
        "non-blocking, n/N": (NonBlocking(4, scaling="n/N"), "allreduce"),
        "non-blocking, d-psgd": (NonBlocking(4), "d-psgd"),
        "non-blocking, matcha": (NonBlocking(4), "matcha"),
        "elastic-bsp": (ElasticBSP(4), "allreduce"),
        "elastic-bsp, local": (ElasticBSP(4, updates="local"), "allreduce"),
    }


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    seeds = int(sys.argv[1])
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16, labels, test_size=0.25, random_state=0, stratify=labels)
    x, x_test, y, y_test = (torch.as_tensor(part) for part in parts)
    x, x_test = x.float(), x_test.float()
    outcome: dict[str, list] = {}
    for name in schemes(hvd.size()):
        outcome[name] = []
        for seed in range(seeds):
            policy, sync = schemes(hvd.size())[name]
            torch.manual_seed(seed)
            model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
            balance = LoadBalance(policy, global_batch=GLOBAL_BATCH, sync=sync)
            loader = BalancedLoader(Indexed(len(x)), balance, shuffle=True, seed=seed)
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), balance, model.named_parameters()
            )
            once = True
            for _ in range(EPOCHS):
                seen: list[int] = []
                for index in loader:
                    seen += index.tolist()
                    time.sleep(PAUSE_S * len(index) * hvd.rank())
                    optimizer.zero_grad()
                    functional.cross_entropy(model(x[index]), y[index]).backward()
                    optimizer.step()
                everybody = sorted(i for part in hvd.allgather_object(seen, name="seen") for i in part)
                once &= everybody == list(range(len(x)))
            optimizer.average_parameters()
            with torch.no_grad():
                logits = model(x_test)
            right = float((logits.argmax(1) == y_test).float().mean())
            loss = float(functional.cross_entropy(logits, y_test))
            outcome[name].append({"accuracy": right, "loss": loss, "once": once, "rounds": balance.rounds})
            balance.close()
            if hvd.rank() == 0:
                print(name, flush=True)
    report(outcome)


if __name__ == "__main__":
    main()
