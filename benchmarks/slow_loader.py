"""BSP to LB-BSP and back if one rank's loader is slow: a replay's prediction, beside the measurement.

    python benchmarks/slow_loader.py [--write] [--cycles N] [--rounds N] [--keep FOLDER]

Two ranks compute for 1 ms a sample. Fetching takes the last rank 1 ms a sample without loader workers, and 1 and 3 ms
with two, which hide the first. Both policies train in turn. From the telemetry of each, ``hvd-hetero simulate --from``
foretells the other: 12 pairs of a run and a policy. Rates leave out the first tenth of the samples. Target: within 10 %
of the measured rate, or a range of less than 20 % that holds it, in ten of twelve. Takes about 2 minutes.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
from _report import write_result

from hvd_hetero.telemetry import read_run
from hvd_hetero.testing import KEEP_MEMORY, launch
from hvd_hetero.tools.simulation.compare import WARM_UP, compare_between
from hvd_hetero.tools.simulation.description import recorded_description
from hvd_hetero.tools.simulation.policy_choices import choose

RANK = Path(__file__).with_name("_slow_loader_rank.py")
JOBS = ((0, 1.0), (2, 1.0), (2, 3.0))
"""Loader workers, and milliseconds to fetch a sample."""
POLICIES = ("bsp", "lb-bsp")
WITHIN, WIDTH, LEAST_RIGHT = 0.10, 0.20, 10 / 12


def rate(path: Path) -> float:
    """Return samples per second without the first tenth of the samples."""
    run = read_run(path)
    samples = run.samples.sum(axis=1)
    counts = np.cumsum(samples) >= WARM_UP * samples.sum()
    return float(samples[counts].sum() / run.elapsed_s[counts].sum())


def foretold(path: Path, policy: str) -> tuple[float, float, float]:
    """Return what a run foretells of a policy: samples per second, the least and the most."""
    described, _ = recorded_description(read_run(path), [choose(name, "benchmark") for name in POLICIES])
    [found] = [outcome for outcome in compare_between(described) if outcome.policy == policy]
    return found.samples_per_s, *found.between.get("samples_per_s", (found.samples_per_s,) * 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=2, help="runs of each policy and loader (%(default)s)")
    parser.add_argument("--rounds", type=int, default=120, help="rounds of a run (%(default)s)")
    parser.add_argument("--keep", type=Path, help="copy the runs' files into this folder")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    lines = ["| workers | loader | from | to | measured before | measured | foretold | off | right |"]
    lines, right, pairs = [*lines, "|---:|---:|---|---|---:|---:|---:|---:|---|"], 0, 0
    for workers, load_ms in JOBS:
        with tempfile.TemporaryDirectory() as name:
            out = Path(name)
            arguments = ["--load-ms", load_ms, "--workers", workers, "--policies", *POLICIES, "--out", out]
            launch(
                RANK, 2, [*arguments, "--cycles", options.cycles, "--rounds", options.rounds], timeout_s=600,
                env=KEEP_MEMORY,
            )  # fmt: skip
            for cycle in range(options.cycles):
                files = {policy: out / f"{policy}-{cycle}.jsonl" for policy in POLICIES}
                for source, other in (POLICIES, POLICIES[::-1]):
                    true, (told, least, most) = rate(files[other]), foretold(files[source], other)
                    fits = abs(told / true - 1) <= WITHIN or (least <= true <= most < (1 + WIDTH) * least)
                    right, pairs = right + fits, pairs + 1
                    lines.append(
                        f"| {workers} | {load_ms:g} ms | {source} | {other} | {rate(files[source]):.0f} | {true:.0f} "
                        f"| {told:.0f} ({least:.0f} … {most:.0f}) | {told / true - 1:+.1%} "
                        f"| {'yes' if fits else '**no**'} |"
                    )
            if options.keep is not None:
                shutil.copytree(out, options.keep / f"{workers}-{load_ms:g}", dirs_exist_ok=True)
    met = right >= LEAST_RIGHT * pairs
    lines += ["", f"Right: {right} of {pairs}. Target: 10 of 12: {'met' if met else '**missed**'}."]
    text = "\n".join(lines)
    print(text)
    if options.write:
        write_result("slow_loader", text)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
