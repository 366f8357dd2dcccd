"""What `benchmarks/reliability.py` says of a job, from the logs of its ranks."""

from __future__ import annotations

import json

import pytest
from script_modules import load

schedules = load("_reliability_schedules", "benchmarks")
reliability = load("reliability", "benchmarks")


@pytest.mark.parametrize("reports", [2, 1])
def test_ranks_that_are_missing_at_the_end_are_told(monkeypatch, reports):
    plan = next(p for p in map(schedules.schedule, range(100)) if (p.framework, p.left) == ("Keras", 2) and p.exact)

    def started(plan, directory, *rest):
        for rank in range(2):
            events = [
                {"membership": 0, "begins": 0, "rank": rank, "size": 2, "rate": 1.0, "at_s": 0.0, "needs_s": 1.0},
                {"membership": 0, "ends": 0},
            ]
            events += [{"parameters": [0.0] * 7, "size": 2}] * (rank < reports)
            (directory / f"{rank}.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return set()

    monkeypatch.setattr(reliability, "started", started)
    wrong = reliability.run(plan, None, 1.0, 1)["wrong"]
    assert wrong[0].startswith("epochs [] were visited"), "this job has done nothing"
    told = f"{reports} ranks reported at the end, of sizes {{2}}; 2 are left"
    assert wrong[1:] == ([] if reports == 2 else [told])
