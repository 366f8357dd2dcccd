"""Training that is interrupted after any round goes on in a new job as if it had not been."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed
# Every policy on an ordinary dataset; on each other kind of data rounds that end early, and read ahead all others.
CASES = [f"{policy}, 0 workers" for policy in ("self-adaptive", "elastic-bsp")]
CASES += ["lb-bsp, 2 workers", "non-blocking, 0 workers"]
CASES += [f"non-blocking, {data}" for data in ("whole stream", "shards", "whole rounds")]


class Jobs:
    """What rank 0 of the job that saves answers, and rank 0 of the job that resumes."""

    def __init__(self, first, then):
        self._first, self._then = first, then

    def __getitem__(self, case):
        return self._first[0][case], self._then[0][case]


@pytest.fixture(scope="module")
def jobs(pool, tmp_path_factory):
    directory = tmp_path_factory.mktemp("states")
    with (
        pool("torch_resume.py", 2, "torch", ["save", directory]) as first,
        pool("torch_resume.py", 2, "torch", ["resume", directory]) as then,
    ):
        yield Jobs(first, then)


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_the_same_bits_wherever_training_was_interrupted(jobs, case):
    first, resumed = jobs[case]
    assert len(resumed) >= 3
    for stop, job in resumed.items():
        assert job["plans"] == first["whole"]["plans"][int(stop) :], f"after round {stop}"
        assert job["end"] == first["whole"]["end"], f"after round {stop}"


@pytest.mark.parametrize("case", CASES)
def test_stopping_to_save_changes_nothing(jobs, case):
    first, _ = jobs[case]
    assert first["stopping"] == first["whole"]


@pytest.mark.parametrize("case", CASES)
def test_both_jobs_together_visit_each_sample_once(jobs, case):
    first, resumed = jobs[case]
    whole = first["whole"]
    for stop, job in resumed.items():
        visits = whole["visits"][: int(stop)] + job["visits"]
        epochs = whole["epochs"][: int(stop)] + job["epochs"]
        assert visits == whole["visits"]
        if "shards" in case:
            continue  # parts of the data, which go on from epoch to epoch: test_torch_streams.py
        for epoch in range(max(epochs)):  # the last one is left in the middle
            visited = sorted(i for r, of in zip(visits, epochs, strict=True) if of == epoch for i in r)
            if "whole rounds" in case:
                assert len(set(visited)) == len(visited) > 41 - 12
            else:
                assert visited == list(range(41))


def test_the_hard_cases_did_occur(jobs):
    """Plans that change, and rounds that end early, before and after interruptions."""
    for case in ("lb-bsp, 2 workers", "self-adaptive, 0 workers", "elastic-bsp, 0 workers"):
        assert len({tuple(plan) for plan in jobs[case][0]["whole"]["plans"]}) > 2
    early = jobs["non-blocking, 0 workers"][0]["whole"]
    assert sum(len(visits) < sum(plan) for visits, plan in zip(early["visits"], early["plans"], strict=True)) > 3
