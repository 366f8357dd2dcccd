"""One rank of `evaluation.py`: it learns its speed in a training, and then evaluates by turns with four splits."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch.utils.data import TensorDataset

from hvd_hetero.evaluation import EvaluationSpeeds
from hvd_hetero.session import balancer_of
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

GLOBAL_BATCH, ROUNDS, BATCH = 66, 40, 64


def best_split(samples: int, costs_s: list[float]) -> list[int]:
    """Return the split among three ranks whose last one ends first, by trying all of them."""
    best_s, best = np.inf, [samples, 0, 0]
    for first in range(samples + 1):
        second = np.arange(samples - first + 1)
        last_s = np.maximum(second * costs_s[1], (samples - first - second) * costs_s[2])
        place = int(last_s.argmin())
        if (latest_s := max(first * costs_s[0], float(last_s[place]))) < best_s:
            best_s, best = latest_s, [first, place, samples - first - place]
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--costs-ms", type=float, nargs=3, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    costs_s = [cost * 1e-3 for cost in options.costs_ms]
    mine_s = costs_s[hvd.rank()]
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    balance = LoadBalance("lb-bsp", global_batch=GLOBAL_BATCH)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = DistributedOptimizer(sgd, balance, model.named_parameters())
    loader = BalancedLoader(TensorDataset(torch.ones(GLOBAL_BATCH * ROUNDS, 1)), balance)
    for (x,) in loader:
        optimizer.zero_grad()
        time.sleep(mine_s * len(x))
        (model(x) ** 2).mean().backward()
        optimizer.step()

    balancer, session = balancer_of(balance), balance._session
    data = TensorDataset(torch.arange(options.samples, dtype=torch.float64)[:, None])

    def function(batch: Any) -> dict[str, Any]:
        time.sleep(mine_s * len(batch[0]))
        return {"mean": batch[0].mean()}

    def by(shares: Any) -> EvaluationSpeeds:
        speeds = EvaluationSpeeds(balancer)
        speeds._evaluated = np.array(shares, dtype=np.float64)
        return speeds

    later, best = EvaluationSpeeds(balancer), best_split(options.samples, costs_s)
    splits = {"first": lambda: EvaluationSpeeds(balancer), "later": lambda: later, "best": lambda: by(best)}
    splits["equal"] = lambda: by(np.ones(3))
    found: dict[str, Any] = {name: {"s": []} for name in splits}
    for number in range(-1, options.repeats):
        for name in splits if number >= 0 else ["later"]:
            session.evaluation = splits[name]()
            shares = session.evaluation.plan(options.samples).samples
            hvd.barrier()
            began = time.perf_counter()
            figures = balance.evaluate(data, function, batch_size=BATCH)
            hvd.barrier()
            if number >= 0:
                found[name]["s"].append(time.perf_counter() - began)
                found[name] |= {"shares": shares, "off": abs(figures["mean"] - (options.samples - 1) / 2)}
    if hvd.rank() == 0:
        options.out.write_text(json.dumps(found))
    balance.close()


if __name__ == "__main__":
    main()
