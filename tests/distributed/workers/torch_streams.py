"""A stream of Hugging Face's under DDP, on ranks of unequal speed; all are killed in a round, if one is given."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import datasets
import torch
from torch.nn.parallel import DistributedDataParallel

from torch_hooks import BalancedLoader, LoadBalance, SavedTraining

LENGTHS = [700, 1, 0, 150, 90, 400, 33, 64, 210, 500, 128, 300, 77, 347]
SAMPLES, GLOBAL_BATCH, SAVES_EVERY = sum(LENGTHS), 24, 5


def shards(ranges: list[tuple[int, int]]) -> Iterator[dict[str, int]]:
    for begin, end in ranges:
        yield from ({"index": i} for i in range(begin, end))


def noted(sample: dict[str, int], log: str) -> dict[str, int]:
    """Return a sample, and write down that it was read: what a generator yields again, datasets itself passes over."""
    with open(f"{log}-{os.getpid()}", "a") as read:
        print(sample["index"], file=read)
    return sample


def inputs(indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    i = torch.tensor(indices, dtype=torch.float64)[:, None]
    x = torch.cat([(i * k).sin() for k in (1, 2, 3)], 1)
    return x, (x**2).sum(1, keepdim=True)


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def step(model: torch.nn.Module, indices: list[int]) -> torch.Tensor:
    x, y = inputs(indices)
    return torch.nn.functional.mse_loss(model(x), y)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def main(path: Path, attempt: str, killed_at: int, num_workers: int) -> None:
    from ranks import hvd  # not for the test, which imports this module for its model

    torch.set_num_threads(1)
    hvd.init()
    rank = hvd.rank()
    ends = [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]
    stream = datasets.IterableDataset.from_generator(shards, gen_kwargs={"ranges": list(pairwise(ends))})
    stream = stream.map(noted, fn_kwargs={"log": f"{path}/read {attempt}"})
    model = DistributedDataParallel(model_of())
    optimizer = optimizer_of(model)
    balance = LoadBalance("lb-bsp", global_batch=GLOBAL_BATCH)
    loader = BalancedLoader(
        stream, balance, stream="shard", num_workers=num_workers,
        collate_fn=lambda samples: [each["index"] for each in samples],
    )  # fmt: skip
    saved = SavedTraining(
        path / "run.pt", balance, loader, rounds_per_save=SAVES_EVERY, model=model.module, optimizer=optimizer
    )
    with open(path / f"steps {attempt} {rank}", "w") as log:
        for indices in loader:
            if balance.rounds == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = step(model, indices)
            time.sleep(3e-4 * len(indices) * (1 + rank))
            balance.scale(loss).backward()
            optimizer.step()
            print(json.dumps([balance.rounds, indices]), file=log, flush=True)
    saved.save()
    balance.close()
    hvd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
