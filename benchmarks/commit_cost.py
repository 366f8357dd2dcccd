"""What a commit of an elastic job costs: a model of 100 million parameters, SGD with momentum, on two ranks.

    python benchmarks/commit_cost.py [--parameters 100000000] [--rounds 40] [--write]

A commit copies model and optimizer within the memory of each rank, and asks rank 0 whether hosts have come or gone. It
comes before every second round here. Each rank takes one sample a round, which is the least that a step can compute: a
step with more of them is longer, and a commit is not.

    share at a commit in n rounds    time of a commit / (n times the time of a round without one)

Measured beside it in each pair of rounds: a copy by ``copy.deepcopy``, as Horovod's own ``TorchState`` makes one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

RANK = Path(__file__).with_name("_commit_cost_rank.py")
RANKS = 2
TARGET = 0.01
DEFAULT_ROUNDS = 100


def main() -> int:
    from _report import write_result

    from hvd_hetero.testing import Elastic, launch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    job = json.dumps({"parameters": options.parameters, "rounds": options.rounds})
    done = launch(RANK, RANKS, [job], timeout_s=900.0, elastic=Elastic(least=RANKS, most=RANKS))
    lines = [
        f"| rank | parameters | a round | a commit | a commit in {DEFAULT_ROUNDS} rounds (the default), share | "
        "a commit in each round, share | copied by deepcopy |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    shares = []
    for rank, told in enumerate(done.reports):
        round_s, commit_s, deepcopy_s = (
            statistics.median(told[name]) for name in ("rounds_s", "commits_s", "deepcopies_s")
        )
        shares.append(commit_s / round_s / DEFAULT_ROUNDS)
        lines.append(
            f"| {rank} | {told['parameters']:,} | 1 | {commit_s / round_s:.3f} | {shares[-1]:.5f} | "
            f"{commit_s / round_s:.3f} | {deepcopy_s / round_s:.3f} |"
        )
    lines += [
        "",
        "In units of a round of one sample per rank, medians.",
        "",
        f"- share of a commit in {DEFAULT_ROUNDS} rounds at most {TARGET}: {told_of(max(shares))}",
        f"- share of a commit in each round at most {TARGET}: {told_of(max(shares) * DEFAULT_ROUNDS)}",
    ]
    text = "\n".join(lines)
    print(text)
    if options.write:
        print(f"written to {write_result('commit_cost', text)}")
    return int(max(shares) > TARGET)


def told_of(share: float) -> str:
    return "met" if share <= TARGET else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
