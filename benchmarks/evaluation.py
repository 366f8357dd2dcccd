"""How long three unequal ranks take to evaluate 10,000 samples, divided by learned speeds, by the best split, equally.

    python benchmarks/evaluation.py [--write] [--repeats N]

Ranks sleep 0.4, 0.8 and 1.2 ms for each sample, in training and in the evaluation: speeds of 1 : 1/2 : 1/3. They learn
their speeds in a training of 40 rounds. Then `balance.evaluate` runs by turns as the first evaluation, by the speeds in
training, whose steps have a fixed cost of 1 to 2 ms; as a later one, by the last evaluation; with the split that is
found by trying all; and with equal shares. Target: at most 1.1 of the best. Takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from _report import write_result

from hvd_hetero.testing import KEEP_MEMORY, launch

RANK = Path(__file__).with_name("_evaluation_rank.py")
COSTS_MS, SAMPLES, TARGET = (0.4, 0.8, 1.2), 10_000, 1.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="evaluations by each split (%(default)s)")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "found.json"
        arguments = ["--costs-ms", *COSTS_MS, "--samples", SAMPLES, "--repeats", options.repeats, "--out", out]
        launch(RANK, 3, arguments, timeout_s=300, env=KEEP_MEMORY)
        found = json.loads(out.read_text())
    best_s = statistics.median(found["best"]["s"])
    lines = ["| shares | samples of each rank | median s | least to most s | of the best | off by |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    rows = {"first": "learned in training", "later": "learned in the last evaluation", "best": "the best of all splits"}
    for name, said in (rows | {"equal": "equal"}).items():
        each, seconds = found[name], found[name]["s"]
        lines.append(
            f"| {said} | {' + '.join(map(str, each['shares']))} | {statistics.median(seconds):.3f} "
            f"| {min(seconds):.3f} to {max(seconds):.3f} | {statistics.median(seconds) / best_s:.3f} "
            f"| {each['off']:.1g} |"
        )
    met = statistics.median(found["later"]["s"]) <= TARGET * best_s
    lines += ["", f"Target: at most {TARGET} of the best: {'met' if met else '**missed**'}."]
    text = "\n".join(lines)
    print(text)
    if options.write:
        write_result("evaluation", text)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
