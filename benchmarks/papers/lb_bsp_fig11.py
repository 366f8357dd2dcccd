"""LB-BSP, Figure 11: what NARX predicts of an m4.2xlarge in Cluster-B, beside what came.

    python benchmarks/papers/lb_bsp_fig11.py [--traces DIR] [--write]

The paper shows iterations 1200 to 1300 of one worker, and says that the prediction moves "much less" than the speed
where that has a spike, and that it "promptly catches up" where resources change for good. Judged on the whole cluster:

    spike     a batch that the machine slowed by 30 % and more, at the same CPU as before and after: the prediction for
              the next round moves by a share of the spike
    change    a round whose available CPU differs from the one before by 20 % and more: how much of the change of the
              speed the prediction has at once, and one round later

EMA is beside it, which reads no drivers. Machines as in ``_cluster_b`` with 2 % scatter.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import _pictures
import _tables
import numpy as np
from _cluster_b import BATCH, cluster_b
from rich.progress import track

from hvd_hetero.policies import LBBSP
from hvd_hetero.tools.simulation import RoundSimulation

PREDICTORS = ("narx", "ema")
ROUNDS, SKIP, SHOWN, WORKER = 600, 60, 100, 3
SPIKE, CHANGE = 0.7, 1.2


def record(predictor: str, traces: Path | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return speeds, what was predicted of them, and the share of the CPU that there was: (rounds, workers) each."""
    _, machines = cluster_b(traces, 0.02)
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    simulation = RoundSimulation(machines, LBBSP(predictor, tolerance=0.0), BATCH * len(machines.workers))
    for _ in range(ROUNDS):
        share = simulation.machines.availability.at(simulation.now_s)
        table = simulation.step().table
        rows.append((table.column("samples") / table.busy_s, table.column("samples_per_s").copy(), share))
    speeds, told, shares = (np.array(each) for each in zip(*rows, strict=True))
    return speeds[1:], told[:-1], shares[1:]  # predicted in a round for the next


def spikes(speeds: np.ndarray, told: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return, of every spike, by which share of it the next prediction moves."""
    before, at, after = speeds[SKIP:-2], speeds[SKIP + 1 : -1], speeds[SKIP + 2 :]
    calm = np.ptp(np.stack([shares[SKIP:-2], shares[SKIP + 1 : -1], shares[SKIP + 2 :]]), axis=0) < 0.02
    found = calm & (at < SPIKE * before) & (np.abs(after / before - 1) < 0.15)
    moved = told[SKIP + 2 :] - told[SKIP + 1 : -1]
    return np.abs(moved[found]) / (before - at)[found]


def changes(speeds: np.ndarray, told: np.ndarray, shares: np.ndarray, later: int) -> np.ndarray:
    """Return, of every lasting change of CPU, which share of it the prediction has after so many rounds."""
    last, now = slice(SKIP, -3), slice(SKIP + 1, -2)
    ratio = shares[now] / shares[last]
    stays = np.abs(shares[SKIP + 2 : -1] / shares[now] - 1) < 0.02
    jump = speeds[now] / speeds[last]
    found = ((ratio > CHANGE) | (ratio < 1 / CHANGE)) & stays & (np.abs(np.log(jump)) > np.log(CHANGE))
    predicted = told[SKIP + 1 + later : -2 + later or None]
    return ((predicted - speeds[last]) / (speeds[now] - speeds[last]))[found]


def main() -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--traces", type=Path, help="folder with google_cpu_memory_200.csv.gz")

    options = _tables.options(__doc__ or "", extend)
    series = {name: record(name, options.traces) for name in track(PREDICTORS, "simulating")}
    rows: list[list[object]] = []
    seen: dict[str, tuple[float, float, float]] = {}
    for name, one in series.items():
        spiky, first, second = spikes(*one), changes(*one, 0), changes(*one, 1)
        seen[name] = tuple(float(np.median(each)) for each in (spiky, first, second))  # type: ignore[assignment]
        rows.append([name, len(spiky), *(f"{v:.0%}" for v in seen[name][:1]), len(first),
                     *(f"{v:.0%}" for v in seen[name][1:])])  # fmt: skip
    headings = ["spikes", "follows by", "changes", "has at once", "a round later"]
    lines = [*_tables.table(["medians", *headings], rows), ""]
    verdicts = _tables.Verdicts()
    verdicts.check("NARX: the next prediction follows a spike by (paper: much less)", seen["narx"][0], most=0.5)
    verdicts.check("NARX: share of a lasting change that it has at once (paper: promptly)", seen["narx"][1], least=0.5)
    verdicts.check("NARX: the same a round later", seen["narx"][2], least=0.8)
    more = seen["narx"][1] - seen["ema"][1]
    verdicts.check("NARX has of a change at once, more than EMA", more, least=0.3)
    _pictures.store(draw(series), "lb_bsp_fig11", options.write)
    return _tables.finish("lb_bsp_fig11", lines, verdicts, options.write)


def draw(series: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> object:
    figure, axes = _pictures.panels(2, "LB-BSP, Figure 11, simulated: an m4.2xlarge of Cluster-B")
    for axis, (name, (speeds, told, shares)) in zip(axes, series.items(), strict=True):
        # The hundred rounds with the largest change of CPU in the middle.
        steps = np.abs(np.diff(shares[SKIP:-SHOWN, WORKER]))
        first = max(SKIP + int(steps.argmax()) - SHOWN // 2, 0)
        shown = np.arange(first, first + SHOWN)
        axis.plot(shown, speeds[shown, WORKER], color=_pictures.COLOURS[0], label="speed", linewidth=1.2)
        axis.plot(shown, told[shown, WORKER], color=_pictures.COLOURS[1], linestyle="--", label=f"predicted, {name}")
        axis.set_xlabel("round")
        axis.legend(fontsize=8)
    axes[0].set_ylabel("samples per second")
    return figure


if __name__ == "__main__":
    sys.exit(main())
