"""Elastic jobs for tests of either framework, each of which is run once, some at a time."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import Any

from hvd_hetero.testing import Elastic

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SAMPLES, EPOCHS, GLOBAL_BATCH = 100, 3, 24  # five rounds an epoch where rounds are of one size, the last one short
NOTICED_S = 30  # of a rank that is gone, at the latest; less than a rank may be silent for on a busy machine
STARTED_S = 120  # a newcomer, on a busy machine: so long the others wait for it
CONVERGES = {"epochs": 20, "momentum": 0.5}
INEXACT = ("elastic-bsp, local", "d-psgd", "matcha", "non-blocking, d-psgd")  # steps that no single process takes
# From two ranks to three; it ends twelve rounds after that, whenever the third one comes.
JOIN = {
    "ranks": 2, "patience_s": STARTED_S, "policy": "lb-bsp", "faults": [["join", {"at": 6}]], "samples": 500,
    "global_batch": 96, "epochs": 1000, "seconds_per_sample": [1.0, 3.0, 2.0], "ends_in_membership": [1, 12],
    "rounds_per_commit": 3,
}  # fmt: skip


def run(launch: Any, reliability: Any, script: str, framework: str, timeout_s: float, **options: Any) -> Any:
    """Run one job. Returns what its ranks reported, what they wrote down, and what they said."""
    ranks, patience_s = options.pop("ranks", 3), options.pop("patience_s", NOTICED_S)
    spares = options.get("spares", 0)
    with tempfile.TemporaryDirectory(prefix="hvd-hetero-elastic-") as directory:
        default = {
            "samples": SAMPLES, "epochs": EPOCHS, "global_batch": GLOBAL_BATCH, "rounds_per_commit": 2,
            "seconds_per_sample": [1.0, 2.0, 4.0, 1.0], "directory": directory, "faults": [],
        }  # fmt: skip
        spec = default | options
        result = launch(
            BENCHMARKS / script, ranks, [json.dumps(spec)], timeout_s=timeout_s, framework=framework,
            env={"HOROVOD_GLOO_TIMEOUT_SECONDS": str(patience_s)}, elastic=Elastic(least=1, spares=spares),
        )  # fmt: skip
        struck = len(list(Path(directory).glob("fault.*")))
        assert struck == len([kind for kind, _ in spec["faults"] if kind != "report"]), "a fault did not happen"
        lost_in_its_place = (Path(directory) / "spare.lost").exists()
        assert lost_in_its_place == spec.get("spare_is_lost", False), "the spare was to be killed as it took its place"
        record = reliability.read(Path(directory))
    return record.ends, record, "".join(result.stderr)


def late(plan: list[int], speeds: list[float]) -> float:
    """How much later than the best split this one ends."""
    return max(x / v for x, v in zip(plan, speeds, strict=True)) * sum(speeds) / sum(plan) - 1


def require_two_survivors(reports: Any, record: Any, said: str, epochs: int) -> None:
    """After one of three ranks was killed in the middle of a round."""
    assert [each["size"] for each in record.memberships] == [3, 2]
    assert record.lost > 0, "it was killed while something was uncommitted"
    assert len(reports) == 2
    assert reports[0]["parameters"] == reports[1]["parameters"]
    assert reports[0]["seen"] == list(range(epochs)), "what follows an epoch was done once for each"
    assert said.count("2 ranks go on after round") == 1


def require_a_recovery_told(record: Any, said: str) -> None:
    """Of two survivors of three: in the record of the first round and in the log, and no longer than since the kill."""
    (change,) = record.changes
    assert (change.kind, change.before, change.after) == ("kill", 3, 2)
    assert 0 < change.recovered_s < change.from_kill_s + 3.0, "by two clocks"
    assert said.count(" of 2 recovered in ") == 2


def late_after_a_join(record: Any) -> float:
    """How much later than the best split that of ``JOIN`` ends, ten rounds after the third rank has come."""
    assert [each["size"] for each in record.memberships] == [2, 3]
    begins = record.memberships[1]["begins"]
    assert len(record.plans) == begins + 12
    speeds = [1 / needs_s for needs_s in record.needs_s[1]]
    full = [plan for plan in record.plans[begins : begins + 10] if sum(plan) == 96]
    assert full[0][record.newcomers[1][0]] == 32, "a newcomer begins with an equal share"
    return late(full[-1], speeds)


def require_every_sample_once(reports: Any, record: Any) -> None:
    """Of the job ``JOIN``."""
    assert len({tuple(report["parameters"]) for report in reports}) == 1
    visits = record.visits()
    *whole, last = sorted(visits)
    assert all(visits[epoch] == list(range(500)) for epoch in whole)
    assert len(set(visits[last])) == len(visits[last])
    (change,) = record.changes
    assert change.kind == "join"
    assert len(record.newcomers[1]) == 1
    assert change.recovered_s > 0


def example_that_loses_a_rank(launch: Any, script: Path, epochs: int, **options: Any) -> tuple[str, list[int]]:
    """Runs an elastic example on two ranks and kills one after an epoch; what was said, and the epochs told."""
    processes: dict[int, int] = {}
    told: list[int] = []
    killed: list[int] = []

    def watch(_: int, line: str) -> None:
        if begun := re.match(r"process (\d+) is rank (\d+) of 2", line):
            processes[int(begun[2])] = int(begun[1])
        if epoch := re.match(r"epoch (\d+): accuracy", line):
            told.append(int(epoch[1]))
        if told and not killed:
            killed.append(processes[1])
            os.kill(processes[1], signal.SIGKILL)

    done = launch(script, 2, ["--epochs", epochs], elastic=Elastic(), on_line=watch, **options)
    assert killed
    return "".join(done.stdout), told
