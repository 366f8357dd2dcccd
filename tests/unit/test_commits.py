"""How often to commit: the share of the time that commits take, by a clock that is set by hand."""

from __future__ import annotations

import pytest

from hvd_hetero.commits import COMMIT_FRACTION, CommitPace, every


class Job:
    """Rounds and commits of one rank, which does what it has measured; ``now`` is its clock."""

    def __init__(self):
        self.now = 0.0
        self.pace = CommitPace(lambda: self.now)
        self.rounds = self.committed_at = 0
        self.in_commits_s = 0.0
        self.commits: list[int] = []

    def round(self, round_s: float, commit_s: float, late_s: float = 0.0) -> None:
        """A fifth of a commit is done together, and then another rank may be late."""
        if self.pace.is_due("auto", self.rounds - self.committed_at):
            with self.pace.commit(self.rounds):
                self.now += 0.8 * commit_s
                with self.pace.together():
                    self.pace.rounds = self.pace.paid_for
                    self.now += 0.2 * commit_s + late_s
            self.in_commits_s += commit_s
            self.committed_at = self.rounds
            self.commits.append(self.rounds)
        self.now += round_s
        self.rounds += 1


@pytest.mark.parametrize(
    ("round_s", "commit_s", "rounds"),
    [
        (1.0, 0.16, 20_000),
        (0.1, 0.0005, 20_000),
        (0.002, 0.0013, 20_000),
        (1.0, 0.01, 20_000),
        (0.05, 20.0, 200_000),
    ],
)
def test_in_the_long_run_commits_take_no_more_than_their_share_and_with_one_round_less_they_would(
    round_s, commit_s, rounds
):
    job = Job()
    for _ in range(rounds):
        job.round(round_s, commit_s)
    apart = job.commits[-1] - job.commits[-2]
    assert commit_s / (commit_s + apart * round_s) <= COMMIT_FRACTION
    assert apart == 1 or commit_s / (commit_s + (apart - 1) * round_s) > COMMIT_FRACTION
    drawing_apart = sum(at < apart for at in job.commits)
    assert job.in_commits_s <= COMMIT_FRACTION * job.now + (drawing_apart + 1) * commit_s


def test_a_membership_begins_with_a_commit_after_each_round_and_they_draw_apart_by_twos():
    job = Job()
    for _ in range(1000):
        job.round(1.0, 1.0)
    assert job.commits[:9] == [1, 2, 4, 8, 16, 32, 64, 128, 227]
    job.pace.begin()
    assert (job.pace.rounds, job.pace.paid_for) == (1, 1)


def test_a_commit_that_had_to_wait_and_a_round_that_stumbled_change_little():
    job = Job()
    for _ in range(100):
        job.round(1.0, 0.05)
    assert job.pace.paid_for == 5
    job.round(1.0, 3.0)
    for _ in range(20):
        job.round(1.0, 0.05)
    assert job.pace.paid_for == 5, "one of five does not count"
    job.round(50.0, 0.05)
    for _ in range(12):
        job.round(1.0, 0.05)
    assert job.pace.paid_for == 5


def test_to_wait_for_a_rank_that_is_late_costs_nothing_but_what_is_done_together_does():
    job = Job()
    for number in range(200):
        job.round(1.0, 0.05, late_s=0.5 if number % 4 else 0.0)
    assert job.pace.paid_for == 5
    job = Job()
    for _ in range(200):
        job.round(1.0, 0.05, late_s=0.05)
    assert job.pace.paid_for == 10, "always, so it is no lateness"


def test_who_asks_for_the_number_again_without_a_commit_hears_the_same():
    job = Job()
    for _ in range(4):
        job.round(1.0, 10.0)
    told = job.pace.paid_for
    for _ in range(12):  # as a rank that asks in each batch whether hosts have changed
        job.pace.rounds = job.pace.paid_for
    assert job.pace.rounds == told == 2


def test_commits_without_a_round_between_them_say_nothing_of_rounds():
    job = Job()
    for _ in range(50):
        job.round(1.0, 0.05)
    for _ in range(3):
        with job.pace.commit(job.rounds):
            job.now += 0.05
    assert job.pace.paid_for == 5


def test_a_commit_that_fails_is_not_counted():
    job = Job()

    def fails():
        job.now += 1.0
        raise OSError("lost")

    with pytest.raises(OSError, match="lost"), job.pace.commit(1):
        fails()
    assert job.pace.paid_for == 1


def test_a_number_of_the_users_own_is_kept():
    pace = CommitPace()
    pace.rounds = 7
    assert [pace.is_due(3, rounds) for rounds in (2, 3)] == [False, True]
    assert [pace.is_due("auto", rounds) for rounds in (6, 7)] == [False, True]


@pytest.mark.parametrize(("value", "error"), [("often", ValueError), (0, ValueError), (1.5, TypeError)])
def test_what_is_no_number_of_rounds_is_refused(value, error):
    with pytest.raises(error, match=r"commits.*give 1"):
        every("commits", value, remedy="give 1")
    assert (every("commits", "auto", remedy=""), every("commits", 5, remedy="")) == ("auto", 5)
