"""The picture of the demo: batch sizes and waiting times of recorded runs. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hvd_hetero.telemetry import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, for readers who confuse red and green.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def rounds_figure(runs: Mapping[str, Run], title: str = "", *, warm_up: int = 0) -> Figure:
    """Draw batch sizes and waiting times over the rounds: a column per run, a line per rank, shared scales.

    Curves show all rounds. Samples per second and waiting shares are without the first ``warm_up`` rounds, one at
    least: the last lines of the picture say so, and what a record leaves out.
    """
    from matplotlib.figure import Figure  # not pyplot: no window system, no global state

    figure = Figure(figsize=(5.2 * len(runs) + 0.8, 6.0), layout="constrained")
    axes = figure.subplots(2, len(runs), sharex="col", sharey="row", squeeze=False)
    later = []  # the first rounds pay for start-up; a scale that shows them would hide the others
    for (name, run), (batches, waits) in zip(runs.items(), axes.T, strict=True):
        for rank in range(run.workers):
            style = {"color": _COLOURS[rank % len(_COLOURS)], "label": f"rank {rank}", "linewidth": 1.8}
            batches.step(run.round, run.samples[:, rank], where="mid", **style)
            waits.plot(run.round, 1e3 * run.wait_s[:, rank], **style)
        counted = run.after(warm_up)
        batches.set_title(f"{name}:  {counted.throughput:.0f} samples/s", fontsize=12)
        waits.set_xlabel("round")
        shares = "  ".join(f"rank {rank}: {share:.0%}" for rank, share in enumerate(counted.waiting_share))
        where = {"x": 0.98, "y": 0.95, "transform": waits.transAxes, "ha": "right", "va": "top"}
        waits.text(s=f"waiting share  {shares}", fontsize=10, **where)
        later.append(1e3 * run.wait_s[3:][np.isfinite(run.wait_s[3:])])
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("samples per round")
    axes[0, 0].set_ylim(bottom=0)
    axes[1, 0].set_ylabel("waiting, ms per round")
    axes[1, 0].set_ylim(0, 1.3 * max((float(np.percentile(s, 99)) for s in later if s.size), default=1.0))
    axes[0, 0].legend(loc="lower left")
    start = f"the first {warm_up} rounds" if warm_up > 1 else "the first round"
    notes = [f"Samples per second and waiting shares are without the start-up: {start}."]
    notes += [f"{name}: {run.left_out}." for name, run in runs.items() if run.left_out]
    figure.supxlabel("\n".join(notes), fontsize=9)
    if title:
        figure.suptitle(title, fontsize=13)
    return figure
