"""The pool of the distributed tests: a job that dies says why, whenever it dies, and the next case begins another."""

import socket

import pytest
from script_modules import load

pool = load("pool", "tests/distributed")


class Job:
    """A launch of one rank, which this thread plays: it answers ``cases`` cases, then fails."""

    def __init__(self, cases):
        self.launches = 0
        self._cases = cases

    def __call__(self, *_, env, **__):
        self.launches += 1
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(env[pool.ADDRESS])
            with connection.makefile("rw") as file:
                print(0, file=file, flush=True)
                for _ in range(self._cases):
                    file.readline()
                    print('"done"', file=file, flush=True)
        raise RuntimeError("why it died")


def test_a_job_that_dies_between_two_cases_says_why_and_the_next_case_begins_another():
    job = Job(cases=1)
    answers = pool.Pool(job, "worker", 1, ())
    for first, second in (("a", "b"), ("c", "d")):
        assert answers[0][first] == "done"
        assert isinstance(answers._job.exception(10), RuntimeError)
        with pytest.raises(RuntimeError, match="why it died") as caught:
            answers[0][second]
        assert caught.value.__notes__ == [f"in {second}"]
    assert job.launches == 2
