r"""What rounds that the first rank ends can gain if ranks stumble: the bounds of `stumbles.py`, computed.

    python benchmarks/stumbles_bound.py [--write]

n ranks are 1 to 2 times as slow, in equal steps. A sample takes the fastest 1 ms, and a step of an equal share 96 ms.
Micro-batches stumble as in `stumbles.py`: each takes 1 to 4 times as long with probability 0.1, so 1.15 times in the
mean. Speeds are known. Shares take all ranks T_N seconds when none stumbles, where one rank's N micro-batches cost
their fixed part N times. A round's exchange takes 3 ms. The table has samples per second over those of LB-BSP, which
waits for all ranks to do their N = 1:

- **none waits**: X / (1.15 T_1 + exchange), with no cost of further micro-batches. No rule can do more.
- **foresight**: a rule that knows all stumbles to come. It ends a round where the ranks' micro-batches happen to end
  together. Each k_i of a round maximises work - U (length + exchange), with U the share of time at work; a rank meets
  what it has not begun in the next round, so that no rule gets rid of a bad draw.
- **the first ends**: each rank ends the current micro-batch when the first has done its N: `lb-non-blocking` at a
  known N.

The last two are for the best N, which is in brackets; beside it the N of `√((n - 1) / 2nφ)`. That minimises N's cost

    N φ + (n - 1) / 2nN          in steps, with φ the fixed part of a step

where the n - 1 others are anywhere in a micro-batch, 1/N of a step long, when the first is done: the last of them ends
it (n - 1) / nN later in the mean, and the ranks idle for half of that, averaged over all n.

Takes a minute.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np
from _report import write_result
from numpy.typing import NDArray

SHARE, SAMPLE_MS, EXCHANGE_MS = 96, 1.0, 3.0
CHANCE, MOST, MEAN = 0.1, 4.0, 1.15
RANKS = (2, 3, 4, 8)
FIXED = (0.0, 0.005, 0.01, 0.02)  # of a step of an equal share
NUMBERS = (2, 3, 4, 5, 6, 8, 12, 16)
ROUNDS, FORESEEN = 8000, 800
LEAST = 1.05

Floats = NDArray[np.float64]


def factors(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Return how many times as long each micro-batch takes."""
    return np.where(rng.random(shape) < CHANCE, rng.uniform(1.0, MOST, shape), 1.0)


class Ranks:
    """n ranks, and shares that take them all as long."""

    def __init__(self, workers: int, fixed: float) -> None:
        self.workers, self.total = workers, SHARE * workers
        slow = np.linspace(1.0, 2.0, workers)
        self.slope_ms, self.fixed_ms = SAMPLE_MS * slow, fixed * SHARE * SAMPLE_MS * slow

    def micro_batch(self, number: int) -> tuple[float, Floats]:
        """Return a micro-batch's ms without a stumble, and its samples: Σ (t - b_i) / m_i = X / N."""
        pace = 1.0 / self.slope_ms
        lasts_ms = (self.total / number + float(pace @ self.fixed_ms)) / float(pace.sum())
        return lasts_ms, (lasts_ms - self.fixed_ms) * pace

    def lb_bsp(self, rng: np.random.Generator) -> float:
        """Return samples per ms if all wait for the last."""
        lasts_ms, _ = self.micro_batch(1)
        last = factors(rng, (20 * ROUNDS, self.workers)).max(axis=1).mean()
        return self.total / (lasts_ms * float(last) + EXCHANGE_MS)

    def none_waits(self) -> float:
        """Return samples per ms if only computing takes time, and the exchange."""
        return self.total / (MEAN * self.micro_batch(1)[0] + EXCHANGE_MS)

    def first_ends(self, number: int, rng: np.random.Generator) -> float:
        """Return samples per ms if the first to have done its share ends the round."""
        lasts_ms, samples = self.micro_batch(number)
        ends = np.cumsum(lasts_ms * factors(rng, (ROUNDS, self.workers, number)), axis=2)
        heard = ends[:, :, -1].min(axis=1)[:, None, None]
        done = np.minimum((ends < heard * (1 - 1e-9)).sum(axis=2) + 1, number)
        last = np.take_along_axis(ends, done[:, :, None] - 1, axis=2).max(axis=(1, 2))
        return float((done @ samples).sum() / (last + EXCHANGE_MS).sum())

    def foresight(self, number: int, rng: np.random.Generator) -> float:
        """Return samples per ms if each round ends when it is best to, given all that is to come.

        This is U times the rate of ranks that are always at work, so that the luck of the draws is not in it.
        """
        lasts_ms, _ = self.micro_batch(number)
        takes = lasts_ms * factors(rng, (self.workers, FORESEEN * number))
        at_work = 1.0
        for _ in range(4):  # U of the rule that U makes
            begun = np.zeros(self.workers, dtype=np.int64)
            length_all = work_all = 0.0
            for _ in range(FORESEEN):
                ends = np.cumsum([row[b : b + number] for row, b in zip(takes, begun.tolist(), strict=True)], axis=1)
                length = np.unique(ends[ends >= ends[:, 0].max()])
                done = (ends[:, :, None] <= length).sum(axis=1)
                work = np.take_along_axis(ends, done - 1, axis=1).mean(axis=0)
                best = int(np.argmax(work - at_work * (length + EXCHANGE_MS)))
                begun += done[:, best]
                length_all += float(length[best]) + EXCHANGE_MS
                work_all += float(work[best])
            at_work = work_all / length_all
        return at_work * self.total / (MEAN * number * lasts_ms)


def best(of: Callable[[int, np.random.Generator], float], lb: float) -> tuple[float, int]:
    """Return the best ratio, and the number of micro-batches that has it; all meet the same luck."""
    return max((of(number, np.random.default_rng(1)) / lb, number) for number in NUMBERS)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    lines = [
        "| ranks | a micro-batch costs, of a step | none waits | foresight (N) | the first ends (N) | N by the root |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for workers in RANKS:
        for fixed in FIXED:
            ranks = Ranks(workers, fixed)
            lb = ranks.lb_bsp(np.random.default_rng(0))
            seen, first = best(ranks.foresight, lb), best(ranks.first_ends, lb)
            # The fixed part of a step as the shares are, in which all ranks take as long.
            share = float(ranks.fixed_ms.mean()) / ranks.micro_batch(1)[0]
            root = f"{math.sqrt((workers - 1) / (2 * workers * share)):.1f}" if share else ""
            lines.append(
                f"| {workers} | {fixed:.1%} | {ranks.none_waits() / lb:.3f} | {seen[0]:.3f} ({seen[1]}) | "
                f"{'**' if first[0] < LEAST else ''}{first[0]:.3f}{'**' if first[0] < LEAST else ''} ({first[1]}) | "
                f"{root} |"
            )
    lines += ["", f"Samples per second over LB-BSP's. Bold: below {LEAST} with the best number of micro-batches."]
    text = "\n".join(lines)
    print(text)
    if options.write:
        write_result("stumbles_bound", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
