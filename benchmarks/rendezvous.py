"""What it takes until n ranks have found each other: requests to the launcher, its processor time, and seconds.

    python benchmarks/rendezvous.py [--ranks 2,4,8,16,32] [--beside DIR] [--limit 90] [--write]

Ranks do nothing but start Horovod, all at once, as they do after a change of membership. They are forked from a process
that has imported it, and that serves them as the launcher: Horovod's own server, which counts. ``--beside`` names a
directory with the same build of Horovod, but for the last patches of its series, from `ask-for-all-at-once` on. The
time is from the last rank's arrival in ``hvd.init()`` until the last one has left it. With more ranks than cores that
is mostly the ranks' own work; requests and the launcher's time do not depend on cores. A dropped connection found no
room in the launcher's queue, and is tried again after a second or more. All hosts are this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

JOB = Path(__file__).with_name("_rendezvous_job.py")
EDITED, BESIDE = "with the edits", "without"


def cases_of(sizes: list[int]) -> list[tuple[int, int]]:
    """Return ranks and hosts: all numbers of ranks on one host, the largest on four, and on a host for each."""
    most = max(sizes)
    return [(ranks, 1) for ranks in sizes] + [(most, hosts) for hosts in (4, most) if most % hosts == 0]


def measured(ranks: int, hosts: int, path: str | None, limit_s: float) -> dict[str, float] | None:
    """Return the figures of one start, or None if it was not done in time."""
    env = os.environ if path is None else os.environ | {"PYTHONPATH": path}
    job = subprocess.Popen(
        [sys.executable, str(JOB), str(ranks), str(hosts)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        answer, _ = job.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
        return None
    if job.returncode:
        raise SystemExit(f"the job of {ranks} ranks on {hosts} hosts ended with {job.returncode}: run {JOB.name} alone")
    return dict(json.loads(answer))


def row(ranks: int, hosts: int, build: str, found: Mapping[str, float] | None, limit_s: float) -> str:
    """Return a line of the table."""
    cells = [str(ranks), str(hosts), build]
    if found is None:
        cells += ["", "", "", "", f"not done in {limit_s:g}"]
    else:
        cells += [
            f"{found['requests']:.0f}", f"{found['requests'] / ranks:.0f}", f"{1e3 * found['cpu_s']:.0f}",
            f"{found['dropped']:.0f}", f"{found['start_s']:.2f}",
        ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> int:
    from _report import write_result

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16,32", help="numbers of ranks (default 2,4,8,16,32)")
    parser.add_argument("--beside", metavar="DIR", help="a directory with a build without the edits")
    parser.add_argument("--limit", type=float, default=90.0, metavar="S", help="seconds for one start (default 90)")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    builds = {EDITED: None} if options.beside is None else {BESIDE: options.beside, EDITED: None}
    rows = [
        "Until all ranks have found each other; all of them arrive at once, and each row is one start.",
        "",
        "| ranks | hosts | Horovod | requests | a rank | launcher's processor, ms | dropped connections | time, s |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for ranks, hosts in cases_of([int(size) for size in options.ranks.split(",")]):
        for build, path in builds.items():
            rows.append(row(ranks, hosts, build, measured(ranks, hosts, path, options.limit), options.limit))
            print(rows[-1], flush=True)
    text = "\n".join(rows)
    print(text)
    if options.write:
        write_result("rendezvous", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
