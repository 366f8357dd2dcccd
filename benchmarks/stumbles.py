"""Ranks that stumble at random: LB-BSP, and its shares in rounds that the first rank ends, on real ranks.

    python benchmarks/stumbles.py [--write] [--sample-ms MS] [--pairs N] [--rounds N] [--seed N]

Two ranks (the second takes twice as long), three (1, 1.5 and 2 times as long) and four (1, 1.25, 1.5 and 2) train a
linear model. Computing is a sleep: 1 ms a sample and half a millisecond a micro-batch on the fastest rank, the real
forward and backward pass included, so a round of LB-BSP takes about 0.17 s. With ``--sample-ms 4`` it takes four times
as long and a micro-batch costs a quarter as much of it; that table is stored beside the other. Each micro-batch takes 1
to 4 times as long, uniformly, with probability 0.1, from a seed. The policies train in alternating blocks of one run.
The ratio is the median over pairs of blocks, with its standard error. Each training is compared with one process that
does the samples really used, round by round.

``stumbles_bound.py`` says what can be reached with which number of ranks and which cost of a micro-batch.

Takes about four minutes, or 16 with ``--sample-ms 4``, on a quiet machine: beside other work ranks wake late, and their
exchange takes far longer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from _report import error_of_median, write_result

from hvd_hetero.testing import launch

LB, OURS = "lb-bsp", "lb-non-blocking"
JOBS = ((1.0, 2.0), (1.0, 1.5, 2.0), (1.0, 1.25, 1.5, 2.0))
LEAST, EXACT = 1.05, 1e-10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of blocks (default 8)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of a block (default 20)")
    parser.add_argument("--warm-up", type=int, default=40, help="rounds of each policy that do not count (default 40)")
    parser.add_argument("--sample-ms", type=float, default=1.0, help="of the fastest rank (default 1)")
    parser.add_argument("--fixed-ms", type=float, default=0.5, help="of the fastest rank's micro-batch (default 0.5)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="which jobs (default 2 3 4)")
    parser.add_argument("--seed", type=int, default=1, help="of stumbles and data (default 1)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each job (default 900)")
    options = parser.parse_args()
    costs = [
        "| ranks, times as slow | policy | none waits, of LB-BSP | computing | end of a round, with waiting | the rest "
        "| the rest, ms a micro-batch |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines = [
        "| ranks, times as slow | LB-BSP, samples/s | first rank ends, samples/s | ratio (least, most of the pairs) "
        "| error | micro-batches, most often | off one process | each sample once |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    met = True
    for factors in (job for job in JOBS if len(job) in options.ranks):
        arguments = ["--policies", LB, OURS, "--factors", *factors]
        arguments += ["--sample-ms", options.sample_ms, "--fixed-ms", options.fixed_ms, "--warm-up", options.warm_up]
        arguments += ["--pairs", options.pairs, "--rounds", options.rounds, "--seed", options.seed]
        worker = Path(__file__).with_name("_stumbles_rank.py")
        found = launch(worker, len(factors), arguments, timeout_s=options.timeout).reports[0]
        lb, ours = found[LB], found[OURS]
        ratios = [b / a for a, b in zip(lb["rates"], ours["rates"], strict=True)]
        ratio, off = statistics.median(ratios), max(lb["difference"], ours["difference"])
        once = lb["each_once"] and ours["each_once"] and ours["epochs"] > 0
        met = met and ratio >= LEAST and off <= EXACT and once
        lines.append(
            f"| {', '.join(map(str, factors))} | {statistics.median(lb['rates']):.1f} | "
            f"{statistics.median(ours['rates']):.1f} | {ratio:.3f} ({min(ratios):.3f}, {max(ratios):.3f}) | "
            f"{error_of_median(ratios, len(ratios)):.3f} | "
            f"{ours['micro_batches']} | {off:.1e} | {'yes' if once else 'NO'}, {ours['epochs']} epochs |"
        )
        for name in (LB, OURS):
            of = found[name]
            costs.append(
                f"| {', '.join(map(str, factors))} | {name} | {of['bound'] / statistics.median(lb['rates']):.3f} | "
                f"{of['computing']:.1%} | {of['ending']:.1%} | {of['other']:.1%} | {of['other_ms']:.2f} |"
            )
    lines += [
        "",
        f"Medians of {options.pairs} alternating pairs of blocks of {options.rounds} rounds, after {options.warm_up}. "
        f"Target: a ratio of at least {LEAST}, parameters within {EXACT:g} of one process, each sample once: "
        f"{'met' if met else 'MISSED'}.",
        "",
        "Where the ranks' time goes, and the samples per second of ranks that do nothing but compute, with the same "
        "stumbles and micro-batches: no rule by which a round ends does more.",
        "",
        *costs,
    ]
    text = "\n".join(lines)
    print(text)
    if options.write:
        write_result("stumbles" if options.sample_ms == 1.0 else f"stumbles_{options.sample_ms:g}_ms", text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
