"""What a report says that each rank is worth, against what happens when the rank is really left out.

    sudo python benchmarks/worth.py [--write] [--rounds N] [--no-hosts]

Twenty cases of two to four real ranks, under LB-BSP on Horovod. A rank's pace is a sleep, a line in its samples with
2 % of scatter, so that ranks do not take each other's processor and only the transfer is the machine's. From the record
of all ranks alone the report foretells samples per second without one of them. Then the others train without it. Some
cases run on hosts of their own (network namespaces, which need root) with links of 100 Mbit/s, or 20 for a slow one.

Targets: the measured rate is inside of the foretold interval in 18 of 20 cases, and off by at most 5 % in the median.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _report import write_result
from _support import Hosts, hosts_available

RANK = Path(__file__).with_name("_worth_rank.py")
GLOBAL_BATCH = 64
SLOPE_S = 0.5e-3
INSIDE, MOST = 0.9, 0.05
DELAY_S = 1e-3
FAST, SLOW = 100.0, 20.0  # Mbit/s


@dataclass(frozen=True)
class Ranks:
    """How much slower each rank is, and, on hosts of their own, the Mbit/s of their links."""

    slower: tuple[float, ...]
    links: tuple[float, ...] = ()

    def without(self, rank: int) -> Ranks:
        """Return the other ranks."""
        return Ranks(*(tuple(v for i, v in enumerate(each) if i != rank) for each in (self.slower, self.links)))

    def __str__(self) -> str:
        links = f", links of {', '.join(f'{link:g}' for link in self.links)} Mbit/s" if self.links else ""
        return f"{' : '.join(f'{factor:g}' for factor in self.slower)}{links}"


CASES = [
    *((Ranks((1, factor)), 1) for factor in (1, 2, 4, 10, 30, 100)), (Ranks((1, 2)), 0),
    *((Ranks((1, 1, factor)), 2) for factor in (2, 10, 100)), (Ranks((1, 2, 4)), 0), (Ranks((1, 2, 4)), 1),
    *((Ranks((1, 1, 1, factor)), 3) for factor in (2, 10, 100)), (Ranks((1, 2, 4, 8)), 2),
    (Ranks((1, 1), (FAST, FAST)), 1), (Ranks((1, 2), (FAST, SLOW)), 1),
    (Ranks((1, 1, 2), (FAST,) * 3), 2), (Ranks((1, 1, 2), (FAST, FAST, SLOW)), 2),
]  # fmt: skip
"""The ranks, and the one that is left out."""


def rate(path: Path) -> float:
    """Return samples per second of whole rounds in the last two thirds, where LB-BSP has settled."""
    from hvd_hetero.telemetry import read_run

    run = read_run(path)
    counts = (run.plan.sum(axis=1) == run.global_batch) & (np.arange(len(run.round)) >= len(run.round) // 3)
    return float(run.samples[counts].sum() / run.elapsed_s[counts].sum())


def train(trainings: list[Ranks], files: dict[Ranks, Path], rounds: int) -> None:
    """Let the ranks train, those on alike networks in one launch."""
    from hvd_hetero.testing import KEEP_MEMORY, launch

    networks = dict.fromkeys((len(each.slower), each.links) for each in trainings)
    for count, links in networks:
        these = [each for each in trainings if (len(each.slower), each.links) == (count, links)]
        told = [([factor * SLOPE_S for factor in each.slower], str(files[each])) for each in these]
        with contextlib.ExitStack() as stack:
            starter: list[str] = []
            if count > 1 and links:  # a rank alone has nobody to reach
                hosts = stack.enter_context(Hosts(count, delay_s=DELAY_S))
                for host, mbit_s in enumerate(links):
                    hosts.link(host, rate_bit_s=1e6 * mbit_s)
                starter = hosts.horovodrun()
            launch(
                RANK, count, [json.dumps(told), rounds, GLOBAL_BATCH], timeout_s=60 + 30 * len(these), env=KEEP_MEMORY,
                starter=starter, on_line=lambda rank, line: print(line, flush=True) if rank == 0 else None,
            )  # fmt: skip


def main() -> int:
    from hvd_hetero.telemetry import read_run
    from hvd_hetero.tools.report.alternatives import alternatives

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150, help="rounds of a training (%(default)s)")
    parser.add_argument("--no-hosts", action="store_true", help="leave out the cases on hosts of their own")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    if options.rounds < 60:
        parser.error("--rounds must be at least 60")
    if not options.no_hosts and not (support := hosts_available()):
        parser.error(f"{support.why}; or give --no-hosts")
    cases = [case for case in CASES if not (options.no_hosts and case[0].links)]
    trainings = list(dict.fromkeys(ranks for case, left in cases for ranks in (case, case.without(left))))
    rows, errors, inside = [], [], 0
    with tempfile.TemporaryDirectory() as name:
        files = {each: Path(name) / f"{number}.jsonl" for number, each in enumerate(trainings)}
        train(trainings, files, options.rounds)
        for ranks, left in cases:
            worth = alternatives(read_run(files[ranks])).worth
            without = next(each for each in worth.each if each.worker == left)
            real, whole, told = rate(files[ranks.without(left)]), rate(files[ranks]), without.rate
            holds = told.least <= real <= told.most
            errors.append(told.likely / real - 1.0)
            inside += holds
            rows.append(
                f"| {ranks} | {left} | {worth.all.likely / whole:.3f} | {told.likely:.0f} | {told.least:.0f} to "
                f"{told.most:.0f} | {real:.0f} | {errors[-1]:+.1%} | {'yes' if holds else '**no**'} | "
                f"{without.times.likely:.2f} | {real / whole:.2f} |"
            )
    off = statistics.median(map(abs, errors))
    missed = [] if inside >= INSIDE * len(cases) else [f"{inside} of {len(cases)} inside, {INSIDE:.0%} wanted"]
    missed += [] if off <= MOST else [f"off by {off:.1%}, {MOST:.0%} at most wanted"]
    text = "\n".join(
        [
            "Samples per second without a rank, as the report of all ranks foretells it, and as measured without it.",
            "",
            "| ranks (times slower) | left out | with all: foretold over measured | without: foretold | between | "
            "measured | error | inside | times all: foretold | measured |",
            "|---|---:|---:|---:|---|---:|---:|---|---:|---:|",
            *rows,
            "",
            f"- Inside of the interval: {inside} of {len(cases)}.",
            f"- Error, median without sign: {off:.1%}; the worst: {max(errors, key=abs):+.1%}.",
            "",
            f"Missed: {'; '.join(missed) or 'nothing'}.",
        ]
    )
    print(text)
    if options.write:
        write_result("worth", text)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
