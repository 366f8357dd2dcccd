"""ElasticBSP, Figure 4(b): a model that computes much and communicates little, where the server is the bottleneck.

    python benchmarks/papers/elastic_fig4b.py [--write] [--seeds N]

The paper (ResNet-50 on CIFAR-100): ElasticBSP reaches BSP's accuracy sooner, and a slightly higher one; ASP and SSP
converge faster than both, and "cost much more training time to complete 300 epochs", because updates are computed one
after the other at the server and queue there. ElasticBSP, BSP, SSP, ASP complete their epochs in this order.

Trained as in ``elastic_fig4``. Assumed: four equal machines (the paper's are), whose iterations scatter by 10 %, a
synchronisation of a tenth of an iteration, and a server that takes ``SERVICE`` of an iteration for each push. A barrier
has one update, and so one service. The paper does not say how long an update takes; that decides the order, so another
table has the time of an epoch at other service times.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from statistics import fmean

import _pictures
import _tables
import elastic_fig4
import numpy as np
from _server import Scheme, ServerSimulation
from elastic_fig4 import BATCH, IMAGE, ITERATION_S, SPEEDS, Run
from rich.progress import track

from hvd_hetero.policies import BSP, ElasticBSP
from hvd_hetero.tools.simulation import Cluster, Compute, Jitter, Network, Worker, simulate

SERVICE, SYNCHRONISATION, SCATTER = 0.5, 0.1, 0.1
SERVICES = (0.1, 0.2, 0.3, 0.4, 0.5)
KINDS = {
    "ElasticBSP, R = 15": lambda: ElasticBSP(15, updates="local", tolerance=0.0),
    "BSP": BSP,
    "SSP, s = 3": lambda: Scheme("ssp", 3),
    "ASP": lambda: Scheme("asp"),
}


def cluster(seed: int, service: float = SERVICE) -> Cluster:
    """Return four equal workers; the link of each pays for the barrier, the server's for a push."""
    workers = (Worker(Compute.at_speed(BATCH / ITERATION_S), variation=(Jitter("batch", SCATTER),)),) * len(SPEEDS)
    # An allreduce of four workers moves 1.5 M over a link; it stands for the barrier, its service included.
    barrier_s = (SYNCHRONISATION + service) * ITERATION_S
    network = Network(message_bytes=1e6, bandwidth=1.5e6 / barrier_s, server_bandwidth=1e6 / (service * ITERATION_S))
    return Cluster(workers, network, seed)


def served(seed: int, service: float = SERVICE) -> Cluster:
    """Return the same for ASP and SSP: a push and a pull take the synchronisation's time on the worker's link."""
    machines = cluster(seed, service)
    return replace(machines, network=replace(machines.network, bandwidth=2e6 / (SYNCHRONISATION * ITERATION_S)))


def asp_over_bsp(service: float) -> float:
    """Return the time of an epoch under ASP over that under BSP."""
    bsp = simulate(cluster(0, service), BSP(), BATCH * len(SPEEDS), 500).rate(10)
    return bsp / ServerSimulation(served(0, service), Scheme("asp"), BATCH).run(2000).rate(40)


def judge(found: dict[str, list[Run]]) -> tuple[list[str], _tables.Verdicts]:
    """Return the table, and the paper's claims checked."""
    goals = [run.accuracy - IMAGE for run in found["BSP"]]
    reached = {n: fmean(r.sooner(g) for r, g in zip(runs, goals, strict=True)) for n, runs in found.items()}
    whole = {n: fmean(r.seconds for r in runs) for n, runs in found.items()}
    accuracy = {n: fmean(r.accuracy for r in runs) for n, runs in found.items()}
    headings = ["accuracy", "s to BSP's accuracy", f"s for {elastic_fig4.EPOCHS} epochs", "of BSP's"]
    rows = [[n, f"{accuracy[n]:.4f}", f"{reached[n]:.1f}", f"{whole[n]:.1f}", whole[n] / whole["BSP"]] for n in KINDS]
    lines = _tables.table(["", *headings], rows)
    elastic, _, ssp, asp = KINDS
    verdicts = _tables.Verdicts()
    sooner, lost = reached[elastic] / reached["BSP"], accuracy["BSP"] - accuracy[elastic]
    verdicts.check("ElasticBSP: time to BSP's accuracy over BSP's (paper: sooner)", sooner, most=0.99)
    verdicts.check("ElasticBSP: accuracy lost against BSP (paper: slightly higher)", lost, most=IMAGE)
    verdicts.check("epochs: ElasticBSP's time over BSP's (paper: less)", whole[elastic] / whole["BSP"], most=0.99)
    verdicts.check("epochs: SSP's time over BSP's (paper: much more)", whole[ssp] / whole["BSP"], least=1.01)
    verdicts.check("epochs: ASP's time over SSP's (paper: more)", whole[asp] / whole[ssp], least=1.0)
    for name in (ssp, asp):
        first = reached[name] / reached[elastic]
        verdicts.check(f"{name}: time to BSP's accuracy over ElasticBSP's (paper: sooner)", first, most=0.99)
    return lines, verdicts


def main() -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=2, help="trainings of each kind (default 2)")

    options = _tables.options(__doc__ or "", extend)
    found: dict[str, list[Run]] = {}
    for name, make in track(KINDS.items(), "training"):
        found[name] = []
        for seed in range(options.seeds):
            policy = make()
            machines = served(seed) if isinstance(policy, Scheme) else cluster(seed)
            found[name].append(elastic_fig4.train(policy, seed, machines))
    lines, verdicts = judge(found)
    lines += ["", f"Means of {options.seeds} seeds. BSP's accuracy: less one test image, {IMAGE:.4f}.", ""]
    other = [[f"{service:g}", asp_over_bsp(service)] for service in SERVICES]
    lines += _tables.table(["a push's service, of an iteration", "an epoch of ASP, of BSP's"], other)
    _pictures.store(draw(found), "elastic_fig4b", options.write)
    return _tables.finish("elastic_fig4b", lines, verdicts, options.write)


def draw(found: dict[str, list[Run]]) -> object:
    figure, (axis,) = _pictures.panels(1, "ElasticBSP, Figure 4(b), simulated")
    for colour, (name, runs) in zip(_pictures.COLOURS, found.items(), strict=False):
        seconds, _, accuracy = np.array(runs[0].curve).T
        smooth = np.convolve(accuracy, np.full(9, 1 / 9), mode="valid")
        style = "--" if name == "ASP" else "-"  # among equal workers SSP is ASP
        axis.plot(seconds[4:-4], smooth, color=colour, linestyle=style, label=name, linewidth=1.4)
        axis.plot(seconds[-5], smooth[-1], "o", color=colour)
    axis.set_xlabel("simulated seconds")
    axis.set_ylabel("test accuracy")
    axis.set_xscale("log")
    axis.set_ylim(0.9, 0.98)
    axis.legend(fontsize=8, loc="lower right")
    return figure


if __name__ == "__main__":
    sys.exit(main())
