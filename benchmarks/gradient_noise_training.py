r"""Compare the noise scale that a training finds with the one from the gradients of all samples, at ten points of it.

Three ranks (threads of this process) with shares of 6 : 3 : 2 train a network on scikit-learn's digits, and a small
transformer on the text of this project's documentation, character by character. At each point the gradient of every
sample is computed at the present parameters: S is their variance, G their mean, φ = S / |G|². |G|² is the mean over the
eight rounds before the point, because it changes from step to step where the loss is steep. The training's own figure
is an average over a part of its rounds (``hvd_hetero.measurement.gradient_noise``), so it is behind where φ moves.

    python benchmarks/gradient_noise_training.py [--write]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hvd_hetero.policies import Goodput, StaticAllocation
from hvd_hetero.testing import run_on_threads
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

ROOT = Path(__file__).resolve().parents[1]
SHARES, POINTS, BEFORE, WITHIN = [6, 3, 2], 10, 8, 0.1
LENGTH = 32


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 64 grey levels and a class for each of the 1,797 digits."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data / 16.0, dtype=torch.float32), torch.tensor(found.target)


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return pieces of the documentation as numbers of characters, and the characters that follow."""
    read = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    codes = np.frombuffer(read.encode("ascii", "ignore"), dtype=np.uint8).astype(np.int64) % 128
    pieces = torch.tensor(codes[: len(codes) // LENGTH * LENGTH - LENGTH + 1][: 1024 * LENGTH + 1])
    x = pieces[:-1].view(-1, LENGTH)
    return x, pieces[1:].view(-1, LENGTH)


class Transformer(torch.nn.Module):
    """One layer of attention over the characters before each one."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.characters, self.places = torch.nn.Embedding(128, width), torch.nn.Embedding(LENGTH, width)
        self.mixed = torch.nn.Linear(width, 3 * width)
        self.hidden, self.out = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, 128)
        self.register_buffer("before", torch.ones(LENGTH, LENGTH).tril().bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of each next character."""
        h = self.characters(x) + self.places.weight
        query, key, value = self.mixed(h).chunk(3, -1)
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~self.before, -torch.inf)
        h = functional.layer_norm(h + scores.softmax(-1) @ value, h.shape[-1:])
        return self.out(torch.relu(self.hidden(h)))


def network() -> torch.nn.Module:
    """Return the network for digits."""
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))


def loss_of(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, over characters, too."""
    return functional.cross_entropy(scores.flatten(0, -2), y.flatten())


def square_of_mean(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return |G|² by all samples."""
    return sum(float(g.square().sum()) for g in torch.autograd.grad(loss_of(model(x), y), [*model.parameters()]))


def true_variance(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return S by the gradients of all samples."""
    state = {name: p.detach() for name, p in model.named_parameters()}

    def of_one(state: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(functional_call(model, state, (x[None],)), y[None])

    total, square = None, 0.0
    for begin in range(0, len(x), 64):
        found = vmap(grad(of_one), in_dims=(None, 0, 0))(state, x[begin : begin + 64], y[begin : begin + 64])
        rows = torch.cat([g.flatten(1) for g in found.values()], dim=1).double()
        square += float(rows.square().sum())
        total = rows.sum(0) if total is None else total + rows.sum(0)
    return (square - len(x) * float((total / len(x)).square().sum())) / (len(x) - 1)


def trained(
    make: Callable[[], torch.nn.Module], data: tuple[torch.Tensor, torch.Tensor], batch: int, rate: float, rounds: int
) -> list[tuple[int, float, float, float]]:
    """Train, and return at each point the round, the loss of all samples, φ as found, and as it is."""
    torch.manual_seed(0)
    models = [make() for _ in SHARES]
    points = [rounds * (k + 1) // POINTS for k in range(POINTS)]

    def case(rank: int) -> list[tuple[int, float, float, float]]:
        model, found = models[rank], []
        same = Goodput(start=batch, least=batch, most=batch, learning_rate="constant")  # measured in every round
        balance = LoadBalance(StaticAllocation(SHARES), global_batch=same)
        loader = BalancedLoader(TensorDataset(*data), balance, shuffle=True, seed=1)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=rate), balance, model.named_parameters()
        )
        scale = [float("nan")]
        balance.on_round(lambda record: scale.__setitem__(0, record.get("noise_scale", float("nan"))))
        for point in track(points, "points") if rank == 0 else points:
            loader.stop_at = point
            squares = []
            while balance.rounds < point:
                for x, y in loader:
                    if rank == 0 and balance.rounds >= point - BEFORE:
                        squares.append(square_of_mean(model, *data))
                    optimizer.zero_grad()
                    loss_of(model(x), y).backward()
                    optimizer.step()
            if rank == 0:
                with torch.no_grad():
                    loss = float(loss_of(model(data[0]), data[1]))
                true = true_variance(model, *data) / (sum(squares) / len(squares))
                found.append((point, loss, scale[0], true))
        balance.close()
        return found

    return run_on_threads(case, len(SHARES), timeout_s=3600.0)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    write = parser.parse_args().write
    torch.set_num_threads(1)
    lines = ["| training | round | loss | φ found | φ of all samples | ratio |", "|---|---:|---:|---:|---:|---:|"]
    ratios = []
    for name, make, data, batch, rate, rounds in (
        ("digits", network, digits(), 110, 0.05, 600),
        ("text", Transformer, text(), 110, 0.1, 600),
    ):
        for point, loss, found, true in trained(make, data, batch, rate, rounds):
            ratios.append(found / true)
            lines.append(f"| {name} | {point} | {loss:.3f} | {found:,.0f} | {true:,.0f} | {ratios[-1]:.3f} |")
    off = sum(abs(ratio - 1.0) > WITHIN for ratio in ratios)
    text_ = "\n".join(lines) + f"\n\nTarget: within {WITHIN:.0%} at each point; {off} of {len(ratios)} are farther off."
    print(text_)
    if write:
        from _report import write_result

        print(write_result("gradient_noise_training", text_))
    if off:
        raise SystemExit(f"the noise scale is more than {WITHIN:.0%} off at {off} points")


if __name__ == "__main__":
    main()
