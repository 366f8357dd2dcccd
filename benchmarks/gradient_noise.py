r"""Compare estimates of gradient noise from unequal batches: here, and by Cannikin's weighing of the ranks' estimates.

n ranks have the mean gradients g_i of b_i samples, B of them in all, whose mean is g. S is the variance of one sample's
gradient, G the true gradient, φ = S / |G|². Cannikin (arXiv 2402.05302) makes two estimates on every rank,

    G_i = (B |g|² - b_i |g_i|²) / (B - b_i),        S_i = b_i B (|g_i|² - |g|²) / (B - b_i),

and adds them up with the weights w = A⁻¹1 / (1ᵀA⁻¹1) of least variance, A being the covariances of the G_i or of the
S_i. In these it takes var |g_i|² as 1/b_i and |g|² as Σ (b_j/B)² |g_j|², without the products g_j·g_k:

    A_G:  (B + 2 b_i) / (B (B - b_i)),              (B² - b_i² - b_j²) / (B (B - b_i) (B - b_j))
    A_S:  b_i (B + 2 b_i) / (B - b_i),              b_i b_j (B - b_i - b_j) / ((B - b_i) (B - b_j))

(on the diagonal, and off it). These follow from its description; its code was not at hand. "Mean" weighs all ranks'
estimates alike.

Every run draws the mean gradients anew, in 64 directions whose variances fall as 1/k. Heavy tails: each sample's noise
has a factor, lognormal with σ = 3/4, whose kurtosis is 9.5 times a normal one's. Batches run geometrically from 16 to
the spread times that.

    python benchmarks/gradient_noise.py [--write]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hvd_hetero.measurement.gradient_noise import noise_of

RANKS, SPREADS, PARTS = (2, 3, 8, 64), (1, 4, 20), (0.25, 4.0)
LEAST, DIRECTIONS, RUNS = 16, 64, 10_000
SIGMA = 0.75
SAME = 1e-9  # relative: rounding, where both methods are the same by algebra

Array = np.ndarray


def drawn(rng: np.random.Generator, sizes: Array, part: float, *, heavy: bool) -> tuple[Array, Array, float, float]:
    """Return |g_i|² and |g|² of every run, and the true S and |G|², with φ of ``part`` times the round."""
    spectrum = 1.0 / np.arange(1, DIRECTIONS + 1)
    variance, batch = float(spectrum.sum()), float(sizes.sum())
    # The gradient has its share in every direction as noise has: the worst case for estimates that it disturbs.
    gradient = np.sqrt(spectrum / (part * batch))
    own, whole = np.empty((RUNS, len(sizes))), np.empty(RUNS)
    for run in range(RUNS):
        scatter = 1.0 / sizes
        if heavy:  # the mean of b normal vectors with factors a_j has the variance of Σ a_j² / b²
            factors = rng.lognormal(-(SIGMA**2), SIGMA, int(batch)) ** 2
            scatter = np.add.reduceat(factors, np.cumsum(sizes) - sizes) / sizes**2
        means = gradient + rng.normal(size=(len(sizes), DIRECTIONS)) * np.sqrt(scatter[:, None] * spectrum)
        mean = sizes @ means / batch
        own[run], whole[run] = np.einsum("id,id->i", means, means), mean @ mean
    return own, whole, variance, variance / (part * batch)


def weights(diagonal: Array, others: Array) -> Array:
    """Return the weights of least variance for a matrix with this diagonal."""
    matrix = others.copy()
    np.fill_diagonal(matrix, diagonal)
    found = np.linalg.solve(matrix, np.ones(len(matrix)))
    return found / found.sum()


def by_ranks(sizes: Array, own: Array, whole: Array) -> dict[str, tuple[Array, Array]]:
    """Return S and |G|² of every run, by Cannikin's weights and by the mean of all ranks."""
    b, batch = sizes.astype(float), float(sizes.sum())
    rest = batch - b
    squares = (batch * whole[:, None] - b * own) / rest
    variances = b * batch * (own - whole[:, None]) / rest
    of_square = weights(
        (batch + 2 * b) / (batch * rest), (batch**2 - b[:, None] ** 2 - b**2) / (batch * np.outer(rest, rest))
    )
    of_variance = weights(b * (batch + 2 * b) / rest, np.outer(b, b) * (batch - b[:, None] - b) / np.outer(rest, rest))
    return {
        "Cannikin": (variances @ of_variance, squares @ of_square),
        "mean": (variances.mean(axis=1), squares.mean(axis=1)),
    }


def compared() -> tuple[str, bool]:
    """Return the table, and whether all cells are as they should be."""
    lines = [
        "| ranks | spread | tails | φ/B | off S, errors | off G², errors | S, here | Cannikin | mean | G², here "
        "| Cannikin | mean |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    off, worse = [], 0
    cells = list(itertools.product(RANKS, SPREADS, (False, True), PARTS))
    for seed, (ranks, spread, heavy, part) in enumerate(track(cells, "cells")):
        rng = np.random.default_rng(seed)
        sizes = np.rint(LEAST * spread ** np.linspace(0.0, 1.0, ranks)).astype(int)
        own, whole, variance, square = drawn(rng, sizes, part, heavy=heavy)
        b = sizes.tolist()
        runs = zip(own.tolist(), whole.tolist(), strict=True)
        ours = np.array([noise_of(b, each, total) for each, total in runs], dtype=float).T
        found = {"here": tuple(ours), **by_ranks(sizes, own, whole)}
        z = [
            (values.mean() - truth) / (values.std() / RUNS**0.5)
            for values, truth in zip(ours, (variance, square), strict=True)
        ]
        off += map(abs, z)
        spreads = {name: (s.std() / variance, g.std() / square) for name, (s, g) in found.items()}
        worse += sum(spreads["here"][k] > spreads["Cannikin"][k] * (1.0 + SAME) for k in (0, 1))
        columns = " | ".join(f"{spreads[name][k]:.3f}" for k in (0, 1) for name in spreads)
        tails = "heavy" if heavy else "normal"
        lines.append(f"| {ranks} | 1:{spread} | {tails} | {part} | {z[0]:+.1f} | {z[1]:+.1f} | {columns} |")
    text = (
        f"Standard deviations over {RUNS:,} runs, relative to the truth.\n\n" + "\n".join(lines) + "\n\n"
        f"{len(cells)} cells, {len(off)} means: the farthest is {max(off):.1f} standard errors from the truth "
        f"({sum(z > 3 for z in off)} are more than 3; chance makes {0.0027 * len(off):.1f} on average). "
        f"In {2 * len(cells) - worse} of {2 * len(cells)} comparisons the standard deviation is at most Cannikin's."
    )
    return text, max(off) <= 3.0 and not worse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    write = parser.parse_args().write
    text, good = compared()
    print(text)
    if write:
        from _report import write_result

        print(write_result("gradient_noise", text))
    if not good:
        raise SystemExit("a mean is more than three standard errors off, or scatters more than Cannikin's")


if __name__ == "__main__":
    main()
