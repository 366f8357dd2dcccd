"""One rank of the tests of false alarms: five models are trained, and ranks that do nothing wrong must not be told so.

``HVD_HETERO_TEST_ROUNDS`` says how long each of them is trained. Ranks have the same kernels, or unlike ones: another
number of threads, and another precision of matrix products.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pool import serve
from ranks import hvd
from torch import nn

from torch_hooks import DistributedOptimizer, LoadBalance

ROUNDS = int(os.environ.get("HVD_HETERO_TEST_ROUNDS", "12"))
LARGE = 256  # a matrix of so many rows is divided among threads


class Words(nn.Module):
    """A recurrent network, or a transformer's layer, over words."""

    def __init__(self, core: nn.Module, *, recurrent: bool) -> None:
        super().__init__()
        self.words, self.core, self.out = nn.Embedding(200, 32), core, nn.Linear(32, 1)
        self.recurrent = recurrent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.core(self.words((x.abs() * 50).long() % 200))
        return self.out((hidden[0] if self.recurrent else hidden)[:, -1])


def layers(*sizes: int) -> nn.Module:
    found = [layer for one, other in itertools.pairwise(sizes) for layer in (nn.Linear(one, other), nn.Tanh())]
    return nn.Sequential(*found[:-1])


def images() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 1),
    )  # fmt: skip


def clipped(optimizer: DistributedOptimizer) -> None:
    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)

    optimizer.register_step_pre_hook(clip)


Make = Callable[[], nn.Module]
MODELS: dict[str, tuple[Make, Callable[..., torch.optim.Optimizer], bool]] = {
    "large, AdamW, clipped": (lambda: layers(16, LARGE, LARGE, 1), torch.optim.AdamW, True),
    "images": (images, partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4), False),
    "recurrent, RMSprop": (
        lambda: Words(nn.LSTM(32, 32, batch_first=True), recurrent=True), partial(torch.optim.RMSprop, lr=1e-3), True
    ),
    "transformer": (
        lambda: Words(nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True), recurrent=False),
        torch.optim.AdamW, True,
    ),
    "float16": (lambda: layers(16, 64, 1).half(), partial(torch.optim.SGD, lr=0.01), False),
}  # fmt: skip


def trained(name: str, *, unlike: bool) -> dict[str, Any]:
    """How many rounds were done, and whether the ranks hold the same bits at the end."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    if unlike:
        torch.set_num_threads(2 if hvd.rank() == 0 else 1)
        torch.set_float32_matmul_precision("highest" if hvd.rank() == 0 else "medium")
    try:
        torch.manual_seed(0)
        make, kind, clips = MODELS[name]
        model = make()
        balance = LoadBalance("bsp", global_batch=16 * hvd.size())
        optimizer = DistributedOptimizer(kind(model.parameters()), balance, model.named_parameters())
        if clips:
            clipped(optimizer)
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(ROUNDS):
            x = torch.randn(16, 16, generator=generator).to(next(model.parameters()).dtype)
            balance.batch(len(x))
            optimizer.zero_grad()
            (model(x) - torch.sin(x.sum(1, keepdim=True))).square().mean().backward()
            optimizer.step()
        flat = torch.cat([p.detach().flatten().double() for p in model.parameters()])
        everywhere = hvd.allgather(flat[None], name="parameters")
        balance.close()
        return {"rounds": balance.rounds, "apart": float((everywhere - everywhere[0]).abs().max())}
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


if __name__ == "__main__":
    serve(
        hvd,
        {
            f"{name}, {'unlike' if unlike else 'like'} kernels": partial(trained, name, unlike=unlike)
            for name in MODELS
            for unlike in (False, True)
        },
    )
