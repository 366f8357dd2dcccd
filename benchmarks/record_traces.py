"""Record this machine: a real training step whose CPU and memory others take away, speed and drivers per round.

    python benchmarks/record_traces.py --schedule TRACES/google_cpu_memory_200.csv.gz

One process ("the rank"), pinned to one core, trains a small convolutional network on one thread. Before each round it
sets what other tasks leave it: the CPU quota of its control group (5 ms period, which is smooth; the kernel's smallest
quota of 1 ms makes 20 % the least), and the memory that a second process in its memory group holds. Then it reads its
drivers with `hvd_hetero.measurement.readings`, as it would in training, and does its round.

The schedule emulates a machine that hosts tasks which come and go (lb-bsp section 5.3: faked tasks with the start and
end times and the consumption of recorded ones). Three slots; a slot is idle with probability 1/4, else it runs one of
the 200 recorded series from a random step on; either lasts a geometric number of points, 12 on average. A point lasts
4 rounds. What is left to the rank is 1 - the sum of the CPU shares, at least 0.2. All drawn from ``--seed`` + the
number of the series. These numbers of the schedule were chosen before the first recording and not changed afterwards.

The rank's group has the highest weight, so that what else runs on the machine disturbs it less; what disturbs it
still is noise, and is in the series. Needs write access to control groups (root in most containers): version 1 `cpu`
and `memory`, or version 2 (written by the documentation, not tried). The groups are made inside the ones this process
is in, and removed at the end. Memory pressure does not slow this step down: there is no swap, and the limit is never
reached. So the memory series are real, but hold no information about the speed.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gzip
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PERIOD_US, LEAST_SHARE = 5000, 0.2
SLOTS, IDLE, MEAN_POINTS, POINT_ROUNDS = 3, 0.25, 12, 4
MEMORY_LIMIT_MIB, HELD_MIB = 1024, 320  # of the rank's group; of the holder when others use 100 %
BATCH, CHANNELS, PIXELS = 192, 16, 32
WARM_UP_ROUNDS = 10


@functools.cache
def _tasks(path: Path) -> NDArray[np.float64]:
    """Return shares of CPU and memory that each task used, (series, steps, 2)."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        table = np.array(
            [
                [float(row[k]) for k in ("series", "step", "cpu_percent", "memory_percent")]
                for row in csv.DictReader(file)
            ]
        )
    ids = np.unique(table[:, 0])
    return np.stack([table[table[:, 0] == i][:, 2:] for i in ids]) / 100.0


def schedule(path: Path, rounds: int, seed: int) -> list[tuple[float, float]]:
    """Return the rank's share of the CPU, and the others' share of memory, for each round."""
    tasks = _tasks(path)
    rng = np.random.default_rng(seed)
    points = math.ceil(rounds / POINT_ROUNDS)
    used = np.zeros((points, 2))
    for _ in range(SLOTS):
        at = 0
        while at < points:
            length = min(int(rng.geometric(1 / MEAN_POINTS)), points - at)
            task, first = tasks[rng.integers(len(tasks))], int(rng.integers(tasks.shape[1]))
            if rng.random() >= IDLE:
                used[at : at + length] += np.take(task, range(first, first + length), axis=0, mode="wrap")
            at += length
    left = np.clip(1.0 - used[:, 0], LEAST_SHARE, 1.0)
    each = [(float(c), float(min(1.0, m))) for c, m in zip(left, used[:, 1], strict=True)]
    return [each[k // POINT_ROUNDS] for k in range(rounds)]


class Groups:
    """The two control groups of a recording, made inside this process's groups."""

    def __init__(self) -> None:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        mine = {controller: path.lstrip("/") for _, names, path in lines for controller in names.split(",")}
        root, name = Path("/sys/fs/cgroup"), f"hvd-hetero-record-{os.getpid()}"
        self.version = 1 if (root / "cpu").is_dir() else 2
        if self.version == 1:
            self.cpu, self.memory = (root / c / mine[c] / name for c in ("cpu", "memory"))
        else:
            self.cpu = self.memory = root / mine[""] / name
            (root / mine[""] / "cgroup.subtree_control").write_text("+cpu +memory")

    def __enter__(self) -> Groups:
        for path in {self.cpu, self.memory}:
            path.mkdir()
        limit = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        (self.memory / limit).write_text(str(MEMORY_LIMIT_MIB << 20))
        if self.version == 1:
            (self.cpu / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.cpu / "cpu.shares").write_text("262144")
        else:
            (self.cpu / "cpu.weight").write_text("10000")
        return self

    def __exit__(self, *_: object) -> None:
        for path in {self.cpu, self.memory}:
            path.rmdir()

    def put(self, pid: int, *, limit_cpu: bool) -> None:
        """Move a process into the memory group and, if asked, the CPU group (one group in version 2)."""
        for path in {self.memory, self.cpu} if limit_cpu else {self.memory}:
            (path / "cgroup.procs").write_text(str(pid))

    def share(self, fraction: float) -> None:
        """Set the quota of the CPU group, as a fraction of one core."""
        quota_us = round(fraction * PERIOD_US)
        if self.version == 1:
            (self.cpu / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (self.cpu / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")


def rank(pipe: Connection, memory: Connection, groups: Groups, left: list[tuple[float, float]], core: int) -> None:
    """Go through the schedule without a pause: set what is left, read the drivers, do the round."""
    import torch

    from hvd_hetero.measurement.readings import ResourceMeter

    pipe.recv()  # not before the groups hold us
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, CHANNELS, 3, padding=1), torch.nn.ReLU(),
        torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, padding=1), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(32 * CHANNELS, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x, y = torch.randn(BATCH, 3, PIXELS, PIXELS), torch.randint(0, 10, (BATCH,))
    meter = ResourceMeter(time.monotonic, interval_s=0.0)
    rounds, now = [], None
    for wanted in [left[0]] * WARM_UP_ROUNDS + left:
        if wanted != now:
            groups.share(wanted[0])
            memory.send(round(wanted[1] * HELD_MIB))  # not waited for: others take memory when it suits them
            now = wanted
        drivers = meter.read()
        began = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        rounds.append((BATCH / (time.perf_counter() - began), drivers.cpu, drivers.memory))
    pipe.send(rounds[WARM_UP_ROUNDS:])


def holder(pipe: Connection) -> None:
    """Hold as many MiB as the last line says."""
    held = bytearray()
    while True:
        mib = pipe.recv()
        del held
        held = bytearray(mib << 20)
        held[::4096] = b"\1" * len(held[::4096])  # touched, so that it is really there


@contextmanager
def child(target: Callable[..., None], *args: object) -> Iterator[int]:
    """Run a process that ends with the block, and yield its number."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield int(process.pid or 0)
    finally:
        process.terminate()
        process.join()


def record(left: list[tuple[float, float]], core: int) -> list[tuple[float, float, float]]:
    """Return a series: (samples per second, cpu, memory) of each round of the schedule."""
    ours, ranks = multiprocessing.Pipe()
    commands, obeys = multiprocessing.Pipe()
    with Groups() as groups, child(rank, ranks, commands, groups, left, core) as worker, child(holder, obeys) as memory:
        groups.put(worker, limit_cpu=True)
        groups.put(memory, limit_cpu=False)
        ours.send("the groups hold you")
        rounds: list[tuple[float, float, float]] = ours.recv()
        return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--schedule", type=Path, required=True, help="csv.gz with series, step, cpu_percent, memory_percent"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "data" / "traces")
    parser.add_argument("--series", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=360)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=2020)
    options = parser.parse_args()
    from hvd_hetero.testing import KEEP_MEMORY

    os.environ.update(KEEP_MEMORY)  # read by the children when they start
    options.out.mkdir(parents=True, exist_ok=True)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, core {options.core}, load {os.getloadavg()[0]:.1f}", flush=True
    )
    for number in range(options.series):
        began = time.monotonic()
        left = schedule(options.schedule, options.rounds, options.seed + number)
        series = record(left, options.core)
        path = options.out / f"series_{number}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("samples_per_s", "cpu", "memory"))
            writer.writerows((f"{v:.1f}", f"{c:.3f}", f"{m:.3f}") for v, c, m in series)
        shares, speeds = [c for c, _ in left], [v for v, _, _ in series]
        print(
            f"{path.name}: {len(series)} rounds in {time.monotonic() - began:.0f} s, "
            f"samples/s {min(speeds):.0f} to {max(speeds):.0f}, median {statistics.median(speeds):.0f}; "
            f"share left {min(shares):.2f} to {max(shares):.2f}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
