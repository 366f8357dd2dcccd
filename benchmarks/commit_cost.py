"""What a commit of an elastic job costs: a model of 100 million parameters, SGD with momentum, on two ranks.

    python benchmarks/commit_cost.py [--parameters 100000000] [--rounds 40] [--framework torch keras] [--write]

A commit copies model and optimizer within the memory of each rank, and asks rank 0 whether hosts have come or gone.
Each rank takes one sample a round, which is the least that a step can compute: a step with more of them is longer, and
a commit is not. Two trainings, one after the other:

    every second round      commits of a known number. Time of a commit / time of a round without one; beside it, a copy
                            into new memory (``copy.deepcopy``), as Horovod's own ``TorchState`` makes one
    "auto", the default     as often as 1 % of the time pays for. Rounds from one commit to the next, once they
                            are no more doubled, and the share of that time which went into the commit; beside it, the
                            same share with the time in which a rank waited for the other one

A commit takes what a rank does alone, and the question that ranks ask together. That takes as long as on the rank that
came last, which waits for no other: the other one would have waited in the next exchange of gradients instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from _commit_cost import WARM_UP

HERE = Path(__file__).parent
RANK = {"torch": HERE / "_commit_cost_rank.py", "keras": HERE / "_commit_cost_rank_keras.py"}
NAMES = {"torch": "PyTorch", "keras": "Keras"}
RANKS = 2
TARGET = 0.01


def main() -> int:
    from _report import write_result

    from hvd_hetero.testing import Elastic, launch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--framework", nargs="+", choices=RANK, default=list(RANK))
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    job = json.dumps({"parameters": options.parameters, "rounds": options.rounds})
    lines = [
        "| framework | rank | parameters | a round | a commit | copied into new memory | "
        "rounds between commits, `auto` | share of the time, `auto` | with waiting |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    shares = []
    for framework in options.framework:
        print(f"{NAMES[framework]} …", file=sys.stderr, flush=True)
        done = launch(RANK[framework], RANKS, [job], timeout_s=1200.0, elastic=Elastic(least=RANKS, most=RANKS))
        for rank, told in enumerate(done.reports):
            cost, deep = costs(told["2"])
            asked_s = zip(*(each["auto"]["together_s"] for each in done.reports), strict=True)
            questions_s = [min(took_s) for took_s in asked_s]
            apart, share, with_waiting = chosen(told["auto"], questions_s)
            shares.append(share)
            lines.append(
                f"| {NAMES[framework]} | {rank} | {told['parameters']:,} | 1 | {cost:.3f} | {deep:.3f} | {apart} | "
                f"{share:.4f} | {with_waiting:.4f} |"
            )
    lines += [
        "",
        "A commit and a copy in units of a round of one sample per rank, medians; shares of all these commits.",
        "",
        f"- share of commits under `auto`, without waiting, at most {TARGET}: "
        f"{'met' if max(shares) <= TARGET else 'MISSED'}",
    ]
    text = "\n".join(lines)
    print(text)
    if options.write:
        print(f"written to {write_result('commit_cost', text)}")
    return int(max(shares) > TARGET)


def costs(told: dict[str, Any]) -> tuple[float, float]:
    """Return the time of a commit and of a copy into new memory, in rounds."""
    round_s = statistics.median(told["rounds_s"][WARM_UP:])
    return tuple(statistics.median(told[name][WARM_UP // 2 :]) / round_s for name in ("commits_s", "copies_s"))


def chosen(told: dict[str, Any], questions_s: list[float]) -> tuple[str, float, float]:
    """Return rounds between the last commits within the epoch, and their share of the time since the one before.

    The first one that is not twice as far from the last as that was from the one before shows what was measured.
    """
    after, at_s = told["commits_after"], told["commits_at_s"]
    apart = [later - earlier for earlier, later in itertools.pairwise(after)]
    settled = [n for n in range(1, len(apart)) if apart[n] != 2 * apart[n - 1] and after[n + 1] < len(told["rounds_s"])]
    if not settled:
        raise RuntimeError(f"commits after {after} rounds have not settled; train for more rounds")
    period_s = sum(at_s[n + 1] - at_s[n] for n in settled)
    took_s = [told["commits_s"][n + 1] for n in settled]
    without_s = [told["commits_s"][n + 1] - told["together_s"][n + 1] + questions_s[n + 1] for n in settled]
    return ", ".join(str(apart[n]) for n in settled), sum(without_s) / period_s, sum(took_s) / period_s


if __name__ == "__main__":
    sys.exit(main())
