"""Which parts of LB-BSP's forecasts earn their place: samples per second without each of them.

    python benchmarks/ablation.py --traces DIR [--write] [--only WORD ...] [--variants NAME ...] [--quick]

Every variant (`_variants.py`) drives the same simulated machines, with production's policy, planner and meters: the
clusters of Figures 8 and 9, the Alibaba jobs, Google's series on Cluster-B, and four small jobs like those that
`speed_torch.py` runs on real ranks. Simulated time is exact, so the figures do not depend on the machine or its load.
A part whose absence costs at most one percent anywhere is not worth its lines.

New splits: rounds in a hundred whose plan differs from the one before. Each costs a real rank something (new buffers,
new kernels) that simulated ranks do not pay.

`Plausibility` has a separate bound: a speed that cannot be leaves the shares as they are. Two jobs show what its
absence costs there: a rank that reports a thousand times its speed, and one whose clock jumps.

Results of 27 November 2026. Each member of the mixture gains more than one per cent somewhere: without one
of the three, rates are lower by 1.2 to 1.7 per cent in one case, and 0.1 or 0.2 in the mean. EMA 0.2 as a fourth costs
2 % in one. Beside the members with drivers NARX gains nothing (0.9868 at least, 0.9998 in the mean), and in the place
of the `Reverting` that reads the CPU it costs 5 %. That one alone is within one per cent of the mixture with drivers
(0.9986 at least), but up to 6 % behind the best single predictor on the Alibaba series, which have no driver.
`Reverting` alone without drivers is within one per cent, too (0.9935 at least, 0.9988 in the mean); the mixture stays
because that one, too, is up to 6 % behind on those series, where `prediction.py` allows 2 %. `Carried`, which followed
jumps of the CPU, left by an earlier table (0.9919 at least without it, 1.0011 in the mean).

`Steady`, which planned by averages of speeds that only scattered, is gone, too (last in 8d9d1f8). Without it simulated
rates had moved by less than one per cent with drivers (0.9909 at least, 0.9987 in the mean) and without (0.9975,
1.0007), though new splits were more frequent by a third. On two real ranks, one at half speed, these cost nothing:
1.006 of LB-BSP as it was, with an error of 0.008 (`results/ablation_half.md`). Where the slow rank changes every 60
rounds, 0.984 with an error of 0.014 decides nothing (`ablation_switching.md`); simulated, it is 1.002 there.

On real ranks: ``python benchmarks/speed_torch.py --only half switching --variant NAME --write``.
"""

from __future__ import annotations

# ruff: noqa: E402 - some are found by the path set below
import argparse
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent / "papers")]

import _tables
import alibaba
from _cluster_a import LEVELS, WORKERS, cluster_a
from _cluster_b import BATCH as BATCH_B
from _cluster_b import cluster_b
from _report import write_result
from _variants import BASE, DRIVEN, VARIANTS, WITH_DRIVERS
from rich.progress import Progress

from hvd_hetero.policies import BSP, LBBSP
from hvd_hetero.tools.simulation import Cluster, Compute, Jitter, Recorded, RoundSimulation, Worker

Found = tuple[float, float]  # samples per second, new splits in a hundred rounds
ONE_PERCENT = 0.01
DECIDED = "What was decided by it: the docstring of `benchmarks/ablation.py`."
IMPLAUSIBLE = {"none": "all ranks honest", "lie": "a thousandfold report", "clock": "one jump of a clock"}


def small(
    slow: tuple[float, ...], scatter: float, seed: int, *, switching: bool = False, frozen: bool = False
) -> Cluster:
    """Return ranks so many times slower than the first.

    ``switching``: another one is the slow one every 60 rounds; ``frozen``: a round of the last takes a thousand times
    as long, before those that count.
    """
    workers = []
    for rank, factor in enumerate(slow):
        variation: list[Jitter | Recorded] = [Jitter("round", scatter)]
        if switching:
            turns = [max(slow) if turn % len(slow) == rank else 1.0 for turn in range(10)]
            variation.append(Recorded("round", tuple(turn for turn in turns for _ in range(60))))
        if frozen and rank == len(slow) - 1:
            variation.append(Recorded("round", (*[1.0] * 9, 1000.0, *[1.0] * 990)))
        workers.append(Worker(Compute(1e-3 * (1.0 if switching else factor), 5e-3), variation=tuple(variation)))
    return Cluster(tuple(workers), seed=seed)


def cases(traces: Path) -> dict[str, Callable[[], tuple[Cluster, int, int, int]]]:
    """Return by name: the machines, samples and number of rounds, and how many of these do not count."""
    found: dict[str, Callable[[], tuple[Cluster, int, int, int]]] = {}
    for level in LEVELS:
        for seed in range(2):
            found[f"Fig. 8, {level} ({seed})"] = lambda level=level, seed=seed: (
                cluster_a(level, 128, 2.0, seed), 128 * WORKERS, 300, 30
            )  # fmt: skip
        found[f"Fig. 9, {level}"] = lambda level=level: (cluster_a(level, 32, 5.0, 0), 32 * WORKERS, 1000, 100)
    for path in sorted(traces.glob("alibaba_pai_job_*.csv")):
        found[f"Alibaba {path.stem[-1]}"] = lambda path=path: _alibaba(path)
    for scatter in (0.02, 0.15):
        found[f"Google, scatter {scatter:.0%}"] = lambda scatter=scatter: (
            cluster_b(traces, scatter)[1], BATCH_B * 32, 600, 60
        )  # fmt: skip
    for scatter in (0.03, 0.1):
        for name, slow in {"equal": (1.0, 1.0), "half": (1.0, 2.0), "three": (1.0, 2.0, 3.0)}.items():
            found[f"{name}, scatter {scatter:.0%}"] = lambda slow=slow, scatter=scatter: (
                small(slow, scatter, 0), 384, 600, 20
            )  # fmt: skip
        found[f"switching, scatter {scatter:.0%}"] = lambda scatter=scatter: (
            small((1.0, 2.0), scatter, 0, switching=True), 384, 600, 20
        )  # fmt: skip
        found[f"frozen once, scatter {scatter:.0%}"] = lambda scatter=scatter: (
            small((1.0, 2.0), scatter, 0, frozen=True), 384, 300, 10
        )  # fmt: skip
    return found


def _alibaba(path: Path) -> tuple[Cluster, int, int, int]:
    machines, rounds = alibaba.cluster(path)
    return machines, alibaba.BATCH * len(machines.workers), rounds, 10


def simulated(case: str, variant: str, traces: Path, share: int) -> Found:
    """Run one variant on one case, for so many times fewer rounds."""
    machines, global_batch, rounds, skip = cases(traces)[case]()
    rounds, skip = max(rounds // share, min(rounds, 150)), max(skip // share, 10)
    if variant == "BSP":
        simulation = RoundSimulation(machines, BSP(), global_batch)
    else:
        policy, predictor = LBBSP, (VARIANTS | DRIVEN)[variant]
        simulation = RoundSimulation(machines, policy(), global_batch, predictor=predictor)
    plans = [simulation.step().plan.samples for _ in range(rounds)]
    changes = sum(a != b for a, b in zip(plans[skip:], plans[skip + 1 :], strict=False))
    return simulation.result.rate(skip), 100.0 * changes / (rounds - skip)


def implausible(kind: str, *, believes: bool) -> float:
    """Return samples per second of three ranks, one of which reports what cannot be, with or without `Plausibility`."""
    simulation = RoundSimulation(small((1.0, 2.0, 3.0), 0.03, 0), LBBSP(), 384, predictor=VARIANTS[BASE])
    if believes:
        simulation.planner._plausibility = None
    simulation.run(40)
    meter = simulation.meters.each[2]
    row, done = meter.row, meter.done

    def lies() -> dict[str, float]:
        told = row()
        return told | {"samples_per_s": 1000.0 * told["samples_per_s"]}

    def jumps(samples: int) -> None:
        done(samples)
        if kind == "clock" and simulation.rounds == 60:
            meter.round.compute_s *= 1e-4

    if kind == "lie":
        meter.row = lies  # type: ignore[method-assign]
    meter.done = jumps  # type: ignore[method-assign]
    return simulation.run(160).rate(40)


def tables(found: dict[tuple[str, str], Found], names: list[str], base: str) -> list[str]:
    """Return each variant's rate as a share of the base's in every case, and the least of these."""
    of_cases = [case for case, variant in found if variant == base]
    rows: list[list[object]] = []
    for name in names:
        ratios = {case: found[case, name][0] / found[case, base][0] for case in of_cases}
        worst = min(ratios, key=ratios.__getitem__)
        rows.append(
            [name, f"{min(ratios.values()):.4f} ({worst})", f"{statistics.fmean(ratios.values()):.4f}",
             f"{statistics.fmean(found[case, name][1] for case in of_cases):.0f}",
             "yes" if ratios[worst] >= 1.0 - ONE_PERCENT else "no"]
        )  # fmt: skip
    headings = ["", f"least, of {base}", "mean", "new splits in 100 rounds", "within 1 %"]
    lines = [*_tables.table(headings, rows), ""]
    lines += ["Case by case: samples per second, and each variant's as a share of them.", ""]
    others = [name for name in names if name != base]
    short = [name.removeprefix(f"{WITH_DRIVERS}, ") for name in others]
    each = [
        [case, f"{found[case, base][0]:.1f}", *(f"{found[case, n][0] / found[case, base][0]:.4f}" for n in others)]
        for case in of_cases
    ]
    return [*lines, *_tables.table(["", base, *short], each)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder with the Alibaba and Google series")
    parser.add_argument("--only", nargs="+", help="cases that have one of these words in their names")
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS, *DRIVEN], choices=[*VARIANTS, *DRIVEN])
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds, or 150, and one seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    chosen = [c for c in cases(options.traces) if not options.only or any(word in c for word in options.only)]
    if options.quick:
        chosen = [case for case in chosen if not case.endswith("(1)")]
    driven = [c for c in chosen if c.startswith(("Fig", "Google"))]  # only there is a driver known
    alone = ["BSP", *(v for v in VARIANTS if v in options.variants or v == BASE)]
    informed = [v for v in DRIVEN if v in options.variants or v == WITH_DRIVERS]
    wanted = [(c, v) for v in alone for c in chosen] + [(c, v) for v in informed for c in driven]
    found: dict[tuple[str, str], Found] = {}
    with ProcessPoolExecutor(options.jobs) as pool, Progress(transient=True) as progress:
        task = progress.add_task("simulating", total=len(wanted))
        jobs = {
            pool.submit(simulated, case, variant, options.traces, 4 if options.quick else 1): (case, variant)
            for case, variant in wanted
        }
        for job in as_completed(jobs):
            found[jobs[job]] = job.result()
            progress.advance(task)
    found = {key: found[key] for key in wanted}
    lines = tables(found, alone, BASE)
    if driven:
        lines += ["", *tables(found, informed, WITH_DRIVERS)]
    rows = [
        [what, *(f"{implausible(kind, believes=believes):.1f}" for believes in (False, True))]
        for kind, what in IMPLAUSIBLE.items()
    ]
    lines += ["", *_tables.table(["samples per second", "with Plausibility", "without"], rows), "", DECIDED]
    text = "\n".join(lines)
    print(text)
    if options.write:
        write_result("ablation", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
