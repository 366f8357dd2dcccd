"""Self-adaptive allocation, Figures 12 and 13: against AD-PSGD, AllReduce and a parameter server.

    python benchmarks/papers/self_adaptive_fig12_13.py [--write]

Figure 12: training loss over time on a GTX 1080 Ti with an RTX 2080 Ti. The paper says that with two workers AD-PSGD is
"almost the same as AllReduce", and that allocation has "a significant acceleration effect". Here the small network on
the digits, times over with noise, is trained by BSP, by self-adaptive allocation and by AD-PSGD, whose neighbours
answer at once, as in its paper, or between two batches (``_gossip.py``). ``SPEEDUP`` is how much
faster the 2080 Ti is (assumed, as in ``self_adaptive_fig6_8``), and a second pair is 1 : 2.

Figure 13: samples per second over a parameter server's, one of four workers (assumed) 2 and 5 times slower. The paper
has 5.36 and 2.75 over the server and "about 3.3" over AllReduce, and says that allocation also aggregates gradients
less often. ResNet-18's sizes as in ``self_adaptive_fig9_10``; self-adaptive once with as many samples per aggregation
as AllReduce, and once with five times as many, as C = 20 micro-batches for four workers are.
"""

from __future__ import annotations

import math
import sys

import _pictures
import _tables
from _digits import noisy_digits
from _gossip import GossipModels, GossipSimulation
from _learners import AllreduceLearner
from self_adaptive_fig9_10 import MICRO_BATCH, MODELS

from hvd_hetero.policies import BSP, Policy, SelfAdaptive
from hvd_hetero.tools.simulation import Cluster, Compute, Network, Options, RoundSimulation, Worker, simulate
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds

SPEEDUP, COPIES, BATCH, EPOCHS, RATE, LOSS = 1.3, 8, 100, 8, 0.5, 0.3
WORKERS, STRAGGLERS, ACCUMULATED = 4, (2.0, 5.0), 5
PAPER = {2.0: 5.36, 5.0: 2.75}
OVER_ALLREDUCE = 3.3
Curve = list[tuple[float, float]]


def losses(speedup: float) -> dict[str, Curve]:
    """Return the training loss over time of each scheme on two workers."""
    problem = noisy_digits(0, COPIES)
    cluster = Cluster.of_speeds([1000.0, 1000.0 * speedup])
    data = lambda: WholeRounds(problem.samples, shuffle=True, seed=0)  # noqa: E731 - a fresh one each
    rounds = EPOCHS * problem.samples // (2 * BATCH)
    found: dict[str, Curve] = {}
    policies: dict[str, Policy] = {"AllReduce": BSP(), "self-adaptive": SelfAdaptive(total=20, every=10)}
    for name, policy in policies.items():
        learner = AllreduceLearner(problem, RATE)
        options = Options(evaluate_every=4)
        simulation = RoundSimulation(cluster, policy, 2 * BATCH, options=options, data=data(), learner=learner)
        found[name] = [(t, loss) for t, _, loss in simulation.run(rounds).loss]
    for name, at_once in (("AD-PSGD, at once", True), ("AD-PSGD, between batches", False)):
        models = GossipModels(problem, RATE, 2)
        gossip = GossipSimulation(cluster, BATCH, answers_at_once=at_once, data=data(), models=models)
        gossip.run(2 * rounds, evaluate_every=8)
        found[name] = [(t, loss) for t, _, loss in gossip.loss]
    return found


def reached(curve: Curve) -> float:
    """Return when the loss first was below the target."""
    return next((t for t, loss in curve if loss <= LOSS), math.inf)


def rates(slower: float) -> dict[str, float]:
    """Return samples per second of each scheme with one worker so many times slower."""
    sample_s, _, megabytes = MODELS["ResNet18"]
    workers = tuple(Worker(Compute(sample_s * (slower if i == 0 else 1.0), 4e-3)) for i in range(WORKERS))
    ring = Cluster(workers, Network(message_bytes=megabytes * 1e6, bandwidth=1.25e8))
    server = Cluster(
        workers, Network("server", message_bytes=megabytes * 1e6, bandwidth=1.25e8, server_bandwidth=1.25e8)
    )
    batch = MICRO_BATCH * WORKERS
    return {
        "parameter server": simulate(server, BSP(), batch, 60).rate(20),
        "AllReduce": simulate(ring, BSP(), batch, 60).rate(20),
        "AD-PSGD": GossipSimulation(ring, MICRO_BATCH).run(600).rate,
        "self-adaptive, as many samples": simulate(ring, SelfAdaptive(total=20, every=5), batch, 60).rate(40),
        "self-adaptive, C = 20": simulate(ring, SelfAdaptive(total=20, every=5), ACCUMULATED * batch, 60).rate(40),
    }


def main() -> int:
    options = _tables.options(__doc__ or "")
    verdicts, lines = _tables.Verdicts(), []
    curves = {speedup: losses(speedup) for speedup in (SPEEDUP, 2.0)}
    names = list(curves[SPEEDUP])
    times = {s: {n: reached(c) for n, c in each.items()} for s, each in curves.items()}
    rows: list[list[object]] = [[n, *(f"{t[n]:.1f}" for t in times.values())] for n in names]
    headings = [f"s to a loss of {LOSS}, workers 1 : {s:g}" for s in curves]
    lines += ["Figure 12:", "", *_tables.table(["", *headings], rows), ""]
    for s, each in times.items():
        base, label = each["AllReduce"], f"Fig. 12, workers 1 : {s:g}"
        limit = (1 + s) / 2
        gain = base / each["self-adaptive"]
        verdicts.check(
            f"{label}: self-adaptive sooner than AllReduce, of the {limit:g} possible", gain / limit, least=0.9
        )
        for n in names[2:]:
            what = f"{label}: {n}, time over AllReduce's (paper: almost 1)"
            verdicts.check(what, each[n] / base, least=0.9, most=1.1)

    found = {slower: rates(slower) for slower in STRAGGLERS}
    server, ring = "parameter server", "AllReduce"
    rows = []
    for n in found[STRAGGLERS[0]]:
        cells = [f"{each[n] / each[base]:.2f}" for each in found.values() for base in (server, ring)]
        rows.append([n, *cells])
    headings = [f"{slower:g} times slower: over {base}" for slower in STRAGGLERS for base in ("the server", ring)]
    lines += ["Figure 13, samples per second:", "", *_tables.table(["", *headings], rows), ""]
    for slower, each in found.items():
        best, label = each["self-adaptive, C = 20"], f"Fig. 13, straggler {slower:g} times slower"
        close = {"least": 0.8 * PAPER[slower], "most": 1.25 * PAPER[slower]}
        verdicts.check(f"{label}: self-adaptive over the server (paper: {PAPER[slower]})", best / each[server], **close)
        verdicts.check(
            f"{label}: self-adaptive over AllReduce (paper: about {OVER_ALLREDUCE})", best / each[ring],
            least=0.8 * OVER_ALLREDUCE, most=1.25 * OVER_ALLREDUCE,
        )  # fmt: skip
    bounds = ", ".join(f"{(s * (WORKERS - 1) + 1) / WORKERS:g} at {s:g}" for s in STRAGGLERS)
    lines += [
        "With the same samples per aggregation, balance alone gains at most (s (n - 1) + 1) / n over AllReduce:",
        f"{bounds} times slower. The rest of the last line is communication that happens a fifth as often.",
    ]
    _pictures.store(draw(curves, found), "self_adaptive_fig12_13", options.write)
    return _tables.finish("self_adaptive_fig12_13", lines, verdicts, options.write)


def draw(curves: dict[float, dict[str, Curve]], found: dict[float, dict[str, float]]) -> object:
    figure, axes = _pictures.panels(3, "Self-adaptive allocation, Figures 12 and 13, simulated")
    for axis, (s, each) in zip(axes, curves.items(), strict=False):
        for colour, (name, curve) in zip(_pictures.COLOURS, each.items(), strict=False):
            style = "--" if name.endswith("batches") else "-"
            axis.plot(*zip(*curve, strict=True), color=colour, linestyle=style, label=name)
        axis.axhline(LOSS, color="#888888", linewidth=0.8, linestyle=":")
        axis.set_title(f"Fig. 12, workers 1 : {s:g}", fontsize=10)
        axis.set_xlabel("simulated seconds")
        axis.set_ylabel("training loss")
        axis.set_yscale("log")
        axis.legend(fontsize=8)
    shown = {n.replace("self-adaptive, ", "self-adaptive,\n"): n for n in found[STRAGGLERS[0]]}
    series = {n: [each[k] / each["parameter server"] for each in found.values()] for n, k in shown.items()}
    series["paper: allocation"] = [PAPER[s] for s in STRAGGLERS]
    _pictures.bars(axes[2], [f"straggler {s:g} times slower" for s in STRAGGLERS], series)
    axes[2].set_title("Fig. 13: samples/s over the parameter server's", fontsize=10)
    axes[2].set_ylim(top=1.6 * axes[2].get_ylim()[1])
    axes[2].legend(fontsize=7, ncols=2, loc="upper left")
    return figure


if __name__ == "__main__":
    sys.exit(main())
