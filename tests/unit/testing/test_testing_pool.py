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


def test_an_interruption_while_the_ranks_are_awaited_leaves_no_half_made_job(monkeypatch):
    """The job ends as its connection does; what interrupts is a test's time limit, for one."""
    job = Job(cases=1)
    answers = pool.Pool(job, "worker", 1, ())
    with monkeypatch.context() as patched:
        patched.setattr(pool.socket.socket, "accept", lambda *_: pytest.fail("the time limit"))
        with pytest.raises((RuntimeError, OSError)) as caught:
            answers[0]["a"]
    assert "the time limit" in str(caught.value.__context__)
    assert answers[0]["a"] == "done"
    assert job.launches == 2
    with pytest.raises(RuntimeError, match="why it died"):
        answers.__exit__()
