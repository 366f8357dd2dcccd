"""Parts of an elastic job's rank for any framework: simulated time, a log, and the job's policies.

Time is simulated: a sample takes as long as its host is said to need, waiting and moving data take nothing, and real
time (milliseconds) hardly counts. So plans follow the faults, not the machine's load.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_hetero.balancer import Balancer
from hvd_hetero.policies import LBBSP, ElasticBSP, NonBlocking, Policy, SelfAdaptive, StaticAllocation, resolve_policy
from hvd_hetero.rounds import FinishedRound
from hvd_hetero.testing import Faults

SEED, FEATURES = 5, 6
RATE, MOMENTUM = 0.05, 0.9  # unless the job says otherwise
REAL_S = 2e-3  # that a micro-batch takes: no job ends before it learns of a new host


def line(samples: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return features, and targets with the sample's number, which shows what a batch holds."""
    rng = np.random.default_rng(SEED)
    x = rng.normal(size=(samples, FEATURES))
    y = x @ np.arange(1.0, FEATURES + 1) + 0.1 * rng.normal(size=samples)
    return x, np.stack([y, np.arange(samples)], 1)


def policy_of(name: str, ranks: int) -> Policy:
    """Return a new policy by its name in the tables; some depend on the number of ranks."""
    made: dict[str, Any] = {
        "static": lambda: StaticAllocation([2, *[1] * (ranks - 1)]),
        "self-adaptive": lambda: SelfAdaptive(total=12, every=4),
        "non-blocking": lambda: NonBlocking(3),
        "elastic-bsp": lambda: ElasticBSP(lookahead=3),
        "elastic-bsp, local": lambda: ElasticBSP(lookahead=3, updates="local"),
        "lb-bsp, ema": lambda: LBBSP("ema"),
        "lb-bsp, narx": lambda: LBBSP("narx"),
    }
    return made[name]() if name in made else resolve_policy(name)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


def told() -> None:
    """Let the log show how long each recovery took."""
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("hvd_hetero.elastic").setLevel(logging.INFO)


def telemetry(job: dict[str, Any], membership: int) -> str:
    """Return the file of a membership's records, which have the seconds of its recovery."""
    return str(Path(job["directory"]) / f"run.{membership}.telemetry")


class Log:
    """A log of one line per event, written at once, so that a killed rank leaves its events."""

    def __init__(self, directory: str) -> None:
        self._file = open(Path(directory) / f"{os.getpid()}.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def __call__(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def rounds(self, balancer: Balancer, **always: Any) -> None:
        """Write down each round of a membership when it is finished; earlier observers of rounds still see it."""
        observer = balancer.observer

        def finished(found: FinishedRound) -> None:
            self(
                **always, finished=found.round, plan=found.plan.samples, at_s=time.monotonic(), now_s=time.time(),
                told=found.table.figures("samples_per_s"),
            )  # fmt: skip
            if observer is not None:
                observer(found)

        balancer.observer = finished


def meet(job: dict[str, Any]) -> None:
    """Wait for the other ranks of the start without Horovod, whose timeout is the time in which it notices a death."""
    directory = Path(job["directory"])
    (directory / f"here.{os.environ['HOROVOD_HOSTNAME']}").touch()
    if "HOROVOD_STARTED_AHEAD" in os.environ:
        if job.get("spare_is_lost"):
            threading.Thread(target=_end_in_its_place, args=(directory / "spare.lost",), daemon=True).start()
        return  # a spare or a newcomer: Horovod will wait
    while len(list(directory.glob("here.*"))) < int(os.environ["HOROVOD_SIZE"]) + job.get("spares", 0):
        time.sleep(0.02)


def _end_in_its_place(mark: Path) -> None:
    """Kill this process as soon as it has a lost rank's place: the others wait to meet it. One of a job does so."""
    while "HOROVOD_GIVEN_PLACE_AT" not in os.environ:
        time.sleep(0.0005)
    with contextlib.suppress(FileExistsError):
        mark.touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)


def faults_of_job(job: dict[str, Any], clock: Clock) -> Faults:
    faults = Faults(job["directory"], clock=clock, sleep=lambda s: clock.pass_s(s * job.get("slept_s", 1.0)))
    for kind, options in job["faults"]:
        getattr(faults, kind)(**options)
    return faults


def seconds_per_sample(needs: Sequence[float]) -> float:
    """Return the seconds per sample of this host, found by its number."""
    return needs[(len(os.environ["HOROVOD_HOSTNAME"]) - len("127.0.0.1")) % len(needs)]


def global_batch(job: dict[str, Any], ranks: int) -> int:
    return int(job["per_rank_batch"] * ranks if "per_rank_batch" in job else job["global_batch"])


def end(job: dict[str, Any], membership: int, rounds: int) -> int | None:
    """Return the round at which the job ends, if it ends in this membership, which began after ``rounds``."""
    number, more = job.get("ends_in_membership", (None, 0))
    return int(rounds + more) if membership == number else None
