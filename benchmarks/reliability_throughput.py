"""The share of throughput that is left if a rank is killed every half minute, and another one comes for it.

    python benchmarks/reliability_throughput.py [--ranks 2 3 4] [--spares 1] [--seconds 1800] [--every 30] [--write]

For each number of ranks, one launch trains without faults for --calm seconds, then with faults for --seconds, then
again without for --calm seconds. Every --every seconds a rank is killed, drawn by the number of the fault, also rank 0.
--after seconds later the launcher finds a new host, as where a lost machine is replaced, and starts a rank there,
imports included. Without spares there are as many as before once it takes part; with --spares, a rank that was ready
has taken the lost one's place, and this one becomes the next spare.

    share kept    samples per second with faults, over those without, before and after, of the same launch

Samples of rounds that were lost and done again count once. What a rank computes is a wait in proportion to its samples
(--sample-ms): ranks have a device each, and this machine's cores have the rest to do, which is what is measured.
All ranks work less while one is missing, so even without any loss at a fault the share is below 1: n ranks of which
one is missing for s seconds in every T keep 1 - s / (n T).

The second table has how long recoveries took, from the telemetry of the same launches, as in `reliability.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _recoveries

RANK = Path(__file__).with_name("_reliability_throughput_rank.py")


@dataclass(frozen=True)
class Outcome:
    """What one launch has shown."""

    ranks: int
    spares: int
    faults: int
    before: float
    """Samples per second before the first fault."""
    during: float
    after: float
    changes: list[_recoveries.Change]

    @property
    def kept(self) -> float:
        """Samples per second with faults over those without."""
        return self.during / ((self.before + self.after) / 2)


def _every(text: str) -> int | str:
    return text if text == "auto" else int(text)


def rates(events: list[dict[str, Any]], ends_at: list[float]) -> list[float]:
    """Return the samples per second between these moments; a round that was lost and done again counts once."""
    latest: dict[int, dict[str, Any]] = {}
    for event in sorted((e for e in events if "finished" in e), key=lambda event: event["membership"]):
        latest[event["finished"]] = event
    found = []
    for begin, end in itertools.pairwise(ends_at):
        samples = sum(sum(event["plan"]) for event in latest.values() if begin < event["now_s"] <= end)
        found.append(samples / (end - begin))
    return found


def run(ranks: int, spares: int, options: argparse.Namespace) -> Outcome:
    """Launch one job, and measure it."""
    from hvd_hetero.testing import Elastic, launch

    faults = int(options.seconds // options.every)
    with tempfile.TemporaryDirectory(prefix="hvd-hetero-throughput-") as name:
        directory = Path(name)
        job = {
            "directory": name, "ranks": ranks, "policy": options.policy, "global_batch": 32 * ranks,
            "sample_s": options.sample_ms / 1e3, "parameters": options.parameters, "rounds_per_commit": options.commit,
            "rounds_per_epoch": 10, "calm_s": options.calm, "seconds": options.seconds, "every": options.every,
            "after_s": options.after, "spares": spares,
        }  # fmt: skip
        launch(
            RANK, ranks, [json.dumps(job)], timeout_s=options.seconds + 2 * options.calm + 180,
            elastic=Elastic(least=1, most=ranks, resets=4 * faults + 4, spares=spares),
            env={"HOROVOD_GLOO_TIMEOUT_SECONDS": str(options.patience)},
        )  # fmt: skip
        events = [json.loads(line) for file in directory.glob("*.jsonl") for line in file.read_text().splitlines()]
        sizes = {event["membership"]: event["size"] for event in events if "begins" in event}
        begin = float((directory / "begins").read_text())
        struck = len(list(directory.glob("fault.*")))
        changes = _recoveries.changes(directory, sizes, events)
    ends_at = [begin, begin + options.calm, begin + options.calm + options.seconds]
    before, during, after = rates(events, [*ends_at, ends_at[-1] + options.calm])
    return Outcome(ranks, spares, struck, before, during, after, changes)


def table(done: list[Outcome]) -> str:
    """Return the shares."""
    lines = [
        "| ranks | spares | killed | samples/s without faults, before and after | with faults | share kept |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {each.ranks} | {each.spares} | {each.faults} | {each.before:.0f}, {each.after:.0f} | {each.during:.0f} "
        f"| {each.kept:.3f} |"
        for each in done
    ]
    return "\n".join(lines)


def main() -> int:
    from _report import write_result

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--spares", type=int, nargs="+", default=[1], help="further ranks that are ready (default 1)")
    parser.add_argument("--seconds", type=float, default=1800.0, help="with faults (default 1800)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds from fault to fault (default 30)")
    parser.add_argument("--after", type=float, default=2.0, help="seconds until a new host is there (default 2)")
    parser.add_argument("--calm", type=float, default=60.0, help="seconds without faults, twice (default 60)")
    parser.add_argument("--policy", default="lb-bsp")
    parser.add_argument("--parameters", type=int, default=1_000_000, help="of the model (default 1,000,000)")
    parser.add_argument("--sample-ms", type=float, default=3.0, help="milliseconds of a sample (default 3)")
    parser.add_argument("--commit", type=_every, default="auto", help="rounds per commit (default: TorchState's, auto)")
    parser.add_argument("--patience", type=int, default=30, help="HOROVOD_GLOO_TIMEOUT_SECONDS (default 30)")
    parser.add_argument("--write", action="store_true", help="store the tables in benchmarks/results")
    options = parser.parse_args()
    if not 0 < options.after < options.every / 2 <= options.seconds / 2:
        parser.error("--after must be above 0 and below half of --every, which must be at most --seconds")
    done = []
    for ranks, spares in itertools.product(options.ranks, options.spares):
        done.append(run(ranks, spares, options))
        print(table(done[-1:]), flush=True)
    recoveries = _recoveries.table(change for each in done for change in each.changes)
    text = (
        f"{table(done)}\n\nRecoveries, median and longest s:\n\n{recoveries}\n\n"
        "How each figure comes about: the docstring of `benchmarks/reliability_throughput.py`."
    )
    print(text)
    if options.write:
        name = "reliability_throughput" + (f"_{options.ranks[0]}_ranks" if len(options.ranks) == 1 else "")
        print(f"written to {write_result(name, text)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
