"""The clock of a recovery: its steps have no gap, and what a rank cannot know is left out."""

from __future__ import annotations

import logging
import math
import time
from types import SimpleNamespace

import pytest

from hvd_hetero.recovery import RecoveryClock, age_s, record_of

STEPS = ("start", "leave", "rendezvous", "broadcast", "set_up", "first_round")


class Watch:
    """Time that passes when it is told to, on a clock of a rank that is 100 s old."""

    def __init__(self):
        self.now_s = 50.0
        self.clock = RecoveryClock(lambda: self.now_s, lambda: 1e9 + self.now_s, lambda: 100.0)

    def after(self, seconds):
        self.now_s += seconds
        return self.clock


def failed(watch):
    """A survivor, up to its first round."""
    watch.clock.notice(0.25)
    for seconds, step in ((0.5, "leave"), (1.0, "rendezvous"), (2.0, "broadcast"), (4.0, "set_up")):
        watch.after(seconds).over(step)
    return watch.clock


def seconds(so_far):
    return [so_far[f"{step}_s"] for step in STEPS]


def test_the_steps_of_a_survivor_follow_each_other_and_sum_to_the_total():
    told = failed(Watch()).so_far
    assert seconds(told) == [None, 0.5, 1.0, 2.0, 4.0, None]
    assert (told["noticed_at"], told["noticed_s"], told["total_s"]) == (1e9 + 50, 0.25, 7.5)


def test_after_another_failure_the_steps_are_done_again_and_the_time_until_then_is_that_of_the_step_at_hand():
    watch = Watch()
    watch.clock.notice(0.25)
    watch.after(1.0).over("leave")
    watch.after(1.0).over("rendezvous")
    watch.after(30.0).notice()  # nobody answers in the broadcast
    for step in ("leave", "rendezvous", "broadcast", "set_up"):
        watch.after(1.0).over(step)
    told = watch.clock.so_far
    assert seconds(told) == [None, 2.0, 2.0, 31.0, 1.0, None]
    assert (told["noticed_at"], told["noticed_s"], told["total_s"]) == (1e9 + 50, 0.25, 36.0)


def test_where_nothing_has_failed_there_is_no_leaving_and_what_fails_while_ranks_meet_counts_to_that():
    watch = Watch()
    watch.clock.notice(0.25, failed=False)
    watch.after(20.0).notice()  # a rank is lost while the others meet
    for step in ("leave", "rendezvous", "broadcast", "set_up"):
        watch.after(1.0).over(step)
    assert seconds(watch.clock.so_far) == [None, 1.0, 21.0, 1.0, 1.0, None]


def test_a_failure_in_the_first_round_counts_its_time_to_first_rounds():
    watch = Watch()
    failed(watch)
    watch.after(8.0)
    told = failed(watch).so_far
    assert seconds(told) == [None, 1.0, 2.0, 4.0, 8.0, 8.0]
    record = record_of([told, {**told, "first_round_s": None, "total_s": None}], 3.0)
    assert record["first_round_s"] == [11.0, 3.0], "of this rank alone, eight were for nothing"
    assert record["total_s"] == [26.0, None]


def test_what_a_newcomer_needs_begins_with_its_process():
    watch = Watch()
    watch.clock.arrive()
    watch.after(1.0).over("broadcast")
    watch.after(2.0).over("set_up")
    told = watch.clock.so_far
    assert seconds(told) == [100.0, None, None, 1.0, 2.0, None]
    assert (told["noticed_at"], told["noticed_s"], told["total_s"]) == (None, None, 103.0)


def test_a_rank_is_new_once():
    watch = Watch()
    watch.clock.arrive()
    watch.clock.stop()  # all have begun together
    watch.after(1.0).arrive()
    assert not watch.clock.running
    assert failed(watch).so_far["start_s"] is None


def test_without_a_change_of_ranks_nothing_is_measured_nor_said(caplog):
    watch = Watch()
    session = Alone(watch)
    with caplog.at_level(logging.INFO):
        assert watch.after(1.0).over("broadcast") == 0.0
        watch.clock.agreed(session)  # the others have something to tell
    assert session.balancer.next_round_over is None
    assert not caplog.records
    assert all(value is None for value in watch.clock.so_far.values())


class Alone:
    """A session of two ranks, of which the other one has taken as long."""

    prefix = "hetero3"

    def __init__(self, watch):
        self.watch, self.wire, self.noted = watch, self, []
        self.balancer = SimpleNamespace(rank=1, workers=2, next_round_over=None, finished=SimpleNamespace(round=57))

    def allgather_object(self, obj, name):
        assert name in ("hetero3.recovered", "hetero3.recovery")
        return [obj, obj]

    def note_recovery(self, record):
        self.noted.append(record)


def first_round(session):
    session.watch.clock.agreed(session)
    session.watch.after(0.125)
    session.balancer.next_round_over()


def test_a_survivor_says_in_one_line_how_long_each_step_took(caplog, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    watch = Watch()
    session = Alone(watch)
    watch.clock.notice(0.25)
    for took_s, step in ((0.5, "leave"), (1.0, "rendezvous"), (0.02, "broadcast")):
        watch.after(took_s).over(step)
    watch.after(0.1)
    with caplog.at_level(logging.INFO, "hvd_hetero.recovery"):
        first_round(session)
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 of 2 goes on from round 57, 1.75 s after it noticed a change of ranks: leaving 0.50 s, rendezvous 1.00 "
        "s, broadcast 0.02 s, set-up 0.10 s, first round 0.12 s; noticed at 01:47:30.000, 0.25 s after its last round"
    ]
    (record,) = session.noted
    assert record["first_round_s"] == [0.125, 0.125]
    assert record["total_s"] == pytest.approx([1.745, 1.745])
    assert not watch.clock.running, "the next one begins by itself"


def test_a_newcomer_says_when_it_takes_part(caplog):
    watch = Watch()
    watch.clock.arrive()
    watch.after(1.0).over("broadcast")
    with caplog.at_level(logging.INFO, "hvd_hetero.recovery"):
        first_round(Alone(watch))
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 of 2 has joined from round 57 on, 101.12 s after it began: start 100.00 s, broadcast 1.00 s, "
        "set-up 0.00 s, first round 0.12 s"
    ]


def test_who_does_not_know_its_age_is_no_newcomer_of_a_made_up_age():
    clock = RecoveryClock(age_s=lambda: math.nan)
    clock.arrive()
    assert not clock.running


def test_the_age_of_a_process_grows_as_it_does():
    earliest_s = time.monotonic()
    before_s = age_s()
    latest_s = time.monotonic()
    time.sleep(0.05)
    least_s = time.monotonic() - latest_s
    grown_s = age_s() - before_s
    assert least_s - 0.02 <= grown_s <= time.monotonic() - earliest_s + 0.02, "each age is told in hundredths"
    assert before_s > 0


def test_a_rank_that_was_started_ahead_began_when_it_was_given_its_place(monkeypatch):
    given_at = time.monotonic() - 2.0
    monkeypatch.setenv("HOROVOD_GIVEN_PLACE_AT", str(given_at))
    assert 2.0 <= age_s() <= time.monotonic() - given_at
