"""How well the learned cost predicts the seconds of micro-batches that it has not seen.

    python benchmarks/cost_fit.py [--write] [--learned N] [--predicted N]

Three small networks train on a CPU, in one thread. A micro-batch has 4 to 24 samples of log-normal lengths (σ = 1, in
bounds), padded to the longest: words for a transformer and an LSTM, pixels of square images, whose sides are multiples
of 8, for a convolutional network. ``CostFit`` learns from the first micro-batches and predicts the others, without
learning from them. For comparison: seconds in proportion to the lengths as they are, to the padded lengths, and to the
number of samples, each scaled by the median of the first part.

The error is |predicted - measured| / measured. Times mean something only if nothing else runs.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from time import perf_counter

import numpy as np
import torch
from _report import write_result
from rich.progress import track
from torch import nn

from hvd_hetero.measurement.cost_fit import CostFit
from hvd_hetero.rounds import SampleFigures

WARM_UP, TARGET = 8, 0.05
WORDS, WIDTH = 1000, 64


class Transformer(nn.Module):
    """A classifier of padded texts."""

    median, bounds = 40, (4, 320)

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.words, self.layers = nn.Embedding(WORDS, WIDTH), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the loss of texts of these lengths."""
        longest = int(lengths.max())
        x = torch.randint(WORDS, (len(lengths), longest))
        padding = torch.arange(longest)[None, :] >= lengths[:, None]
        out = self.layers(self.words(x), src_key_padding_mask=padding)
        mean = out.masked_fill(padding[:, :, None], 0.0).sum(1) / lengths[:, None]
        return nn.functional.cross_entropy(self.head(mean), torch.randint(10, (len(lengths),)))


class Recurrent(nn.Module):
    """An LSTM over padded texts."""

    median, bounds = 40, (4, 320)

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, 10)

    def forward(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the loss of texts of these lengths."""
        x = torch.randint(WORDS, (len(lengths), int(lengths.max())))
        out, _ = self.layer(self.words(x))
        last = out[torch.arange(len(lengths)), lengths - 1]
        return nn.functional.cross_entropy(self.head(last), torch.randint(10, (len(lengths),)))


class Convolutional(nn.Module):
    """A convolutional network on images that are padded to the largest; a length is a number of pixels."""

    median, bounds = 48**2, (16**2, 128**2)

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 64)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(before, width, 3, stride=1 + (before > 3), padding=1), nn.ReLU())
                for before, width in pairwise(widths)
            )
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the loss of square images of so many pixels."""
        side = int(lengths.max().sqrt())
        out = self.layers(torch.randn(len(lengths), 3, side, side)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(out), torch.randint(10, (len(lengths),)))


def lengths_of(network: Transformer | Recurrent | Convolutional, rng: np.random.Generator) -> np.ndarray:
    """Return the lengths of a micro-batch."""
    number = int(rng.integers(4, 25))
    lengths = np.rint(np.clip(network.median * rng.lognormal(0, 1, number), *network.bounds)).astype(np.int64)
    if isinstance(network, Convolutional):
        lengths = (8 * np.rint(np.sqrt(lengths) / 8).astype(np.int64)) ** 2
    return lengths


def measured(network: Transformer | Recurrent | Convolutional, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features and seconds of micro-batches."""
    rng = np.random.default_rng(0)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    features, seconds = [], []
    for _ in track(range(WARM_UP + count), type(network).__name__, transient=True):
        lengths = lengths_of(network, rng)
        of = torch.from_numpy(lengths)
        start = perf_counter()
        optimizer.zero_grad()
        network(of).backward()
        optimizer.step()
        seconds.append(perf_counter() - start)
        features.append(np.array(SampleFigures.of(lengths)))
    return np.array(features)[WARM_UP:], np.array(seconds)[WARM_UP:]


def errors(features: np.ndarray, seconds: np.ndarray, learned: int) -> tuple[dict[str, np.ndarray], CostFit]:
    """Return the errors on what comes after the ``learned`` micro-batches, by rule, and the fit."""
    fit = CostFit()
    for x, t in zip(features[:learned], seconds[:learned], strict=True):
        fit.learn(x, 1, t)
    rules = {"learned": np.array([fit.seconds(x, 1) for x in features[learned:]])}
    for name, of in (
        ("lengths as they are", features[:, 1]),
        ("padded lengths", features[:, 3]),
        ("number", features[:, 0]),
    ):
        rules[name] = np.median(seconds[:learned] / of[:learned]) * of[learned:]
    return {name: np.abs(t / seconds[learned:] - 1) for name, t in rules.items()}, fit


def main() -> int:
    """Measure, and print a table; return 1 if a median error is above the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the table as benchmarks/results/cost_fit.md")
    parser.add_argument("--learned", type=int, default=200, help="micro-batches to learn from")
    parser.add_argument("--predicted", type=int, default=200, help="micro-batches to predict")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines, worst = [], 0.0
    for network in (Transformer(), Recurrent(), Convolutional()):
        features, seconds = measured(network, options.learned + options.predicted)
        found, fit = errors(features, seconds, options.learned)
        if not lines:
            lines = [
                f"| network | median ms | {' | '.join(found)} | learned, 90 % | "
                "cost of number, length, square, padded length, padded square (mean micro-batch) |",
                "|---|---:|" + "---:|" * len(found) + "---:|---|",
            ]
        terms = fit.coefficients * features[: options.learned].mean(axis=0)
        worst = max(worst, float(np.median(found["learned"])))
        lines.append(
            f"| {type(network).__name__} | {np.median(seconds) * 1e3:.1f} | "
            + " | ".join(f"{np.median(error):.1%}" for error in found.values())
            + f" | {np.quantile(found['learned'], 0.9):.1%} | "
            + " : ".join(f"{term:.2f}" for term in terms / terms.sum())
            + " |"
        )
    text = "\n".join(lines) + (
        f"\n\nMedian errors on {options.predicted} micro-batches, after {options.learned} to learn from. "
        f"At most {TARGET:.0%} for each network, learned: {'met' if worst <= TARGET else f'missed ({worst:.1%})'}."
    )
    print(text)
    if options.write:
        print(write_result("cost_fit", text))
    return 0 if worst <= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
