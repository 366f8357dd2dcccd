"""What a rank that waits makes of where the others are."""

from __future__ import annotations

import math

import pytest

from hvd_hetero.watchdog.judgement import judge
from hvd_hetero.watchdog.patience import VARIABLE, Patience, horovod_timeout_s
from hvd_hetero.watchdog.whereabouts import Whereabouts

PATIENCE = Patience(warn=30, deadlock=60, silent=300)


def rank(number, *, at="7 end", waits=True, for_s=35.0, where="a.py:1"):
    return Whereabouts(number, 7, at, waits, where, for_s)


def found(mine, others, silent=None, patience=PATIENCE, **more):
    return judge(mine, others, silent or {}, patience, "Call no collective in the body", **more)


def test_all_wait_in_different_collectives_is_said_and_ends_when_all_have_for_long():
    early = found(rank(0), [rank(1, at="7 body", where="hvd.allreduce() at b.py:2")])
    assert not early.ends
    assert early.reports
    assert (
        "rank 0 has waited for 35 s in round 7, at a.py:1, for rank 1 in round 7, at hvd.allreduce() at b.py:2"
        in early.text
    )
    assert "Call no collective in the body" in early.text
    assert found(rank(0, for_s=61.0), [rank(1, at="7 body", for_s=31.0)]).ends


def test_one_that_has_just_come_to_another_collective_may_go_on():
    assert not found(rank(0, for_s=600.0), [rank(1, at="7 body", for_s=5.0)]).ends


def test_a_rank_at_work_never_ends_the_job_by_itself():
    finding = found(rank(0, for_s=1e6), [rank(1, at="7 body", for_s=1e6), rank(2, waits=False, where="evaluate.py:9")])
    assert not finding.ends
    assert "for rank 2, which is at evaluate.py:9" in finding.text
    assert "rank 1" not in finding.text


def test_a_rank_at_work_ends_it_where_one_has_said_so():
    patience = Patience(busy=100)
    others = [rank(1, waits=False, for_s=1.0)]
    assert not found(rank(0, for_s=99.0), others, patience=patience).ends
    assert found(rank(0, for_s=100.0), others, patience=patience).ends


def test_a_rank_that_waits_where_no_stack_shows_it_is_told_what_to_do():
    """As in ``all_reduce(async_op=True).wait()``, in the body of a loop that another rank skips."""
    finding = found(rank(0), [rank(1, waits=False)])
    assert not finding.ends
    assert "If it waits for others: Call no collective in the body" in finding.text
    assert "does not wait" not in finding.text


def test_a_silent_rank_ends_it_after_a_while():
    assert not found(rank(0), [], {1: 250.0}).ends
    finding = found(rank(0), [], {1: 300.0})
    assert finding.ends
    assert "for rank 1, which does not answer" in finding.text


def test_a_rank_that_has_never_answered_says_nothing_of_itself():
    finding = found(rank(0, for_s=1e6), [rank(1, at="7 body", for_s=1e6)], {2: math.nan})
    assert not finding.ends
    assert "rank 2 never answered" in finding.text


def test_all_in_the_same_collective_is_a_slow_network_for_some_time():
    assert not found(rank(0, for_s=299.0), [rank(1, for_s=299.0)]).ends
    finding = found(rank(0, for_s=300.0), [rank(1, for_s=300.0)])
    assert finding.ends
    assert "the network may be slow" in finding.text


def test_two_lines_of_one_part_of_the_program_may_be_one_collective():
    """Such as a broadcast that the root and the others write in two lines. There is more time; both are named."""
    mine, other = rank(0, at="7 between"), rank(1, at="7 between", where="b.py:2", for_s=1e6)
    finding = found(mine, [other])
    assert not finding.ends
    assert "for rank 1, at b.py:2, and all ranks wait. If these are different collectives: Call no" in finding.text


def test_the_first_of_those_who_see_the_same_speaks():
    others = [rank(1), rank(2, waits=False)]
    assert found(rank(0), others).reports
    assert not found(rank(3), others).reports


def test_many_ranks_are_counted_and_not_listed():
    text = found(rank(0), [rank(n, waits=False) for n in range(1, 1000)]).text
    assert "and 995 more ranks" in text
    assert len(text) < 400


def test_whereabouts_travel_and_fit_a_packet():
    mine = rank(3, where="x" * 500)
    assert Whereabouts.decode(mine.encode()) == mine._replace(where="x" * 200)


@pytest.mark.parametrize(
    ("text", "patience"),
    [
        ("", Patience()),
        ("off", Patience.off()),
        ("warn=10, deadlock=20", Patience(warn=10, deadlock=20)),
        ("busy=3600,silent=inf", Patience(busy=3600, silent=math.inf)),
    ],
)
def test_patience_comes_from_the_environment(monkeypatch, text, patience):
    monkeypatch.setenv(VARIABLE, text)
    assert Patience.of_environment() == patience


@pytest.mark.parametrize("text", ["10", "warn", "warn=x", "wait=3", "warn=0", "warn=-1"])
def test_patience_that_means_nothing_is_refused(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match="must"):
        Patience.of_environment()


def test_the_host_of_a_silent_rank_is_named_where_there_are_several():
    there = found(rank(0), [], {2: 5.0}, hosts=("a", "a", "b"))
    assert "for rank 2 on b, which does not answer" in there.text
    assert there.silence
    assert "for rank 2, which does not answer" in found(rank(0), [], {2: 5.0}, hosts=("a", "a", "a")).text
    never = found(rank(0), [], {2: math.nan}, hosts=("a", "a", "b"))
    assert "rank 2 on b never answered" in never.text
    assert not never.silence


def test_what_ends_the_job_first_is_told():
    assert "Collectives fail after 30 s of it." in found(rank(0), [], {1: 5.0}, collective_timeout_s=30.0).text
    assert "The job ends after 300 s of it" in found(rank(0), [], {1: 5.0}, collective_timeout_s=1800.0).text
    assert found(rank(0), [], {1: 300.0}, collective_timeout_s=30.0).ends


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, math.inf),  # MPI, or another launcher
        ({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"}, 30.0),
        ({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "7"}, 7.0),
    ],
)
def test_horovod_gives_up_as_its_variable_says_where_gloo_carries_it(monkeypatch, environment, seconds):
    for name in ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_TIMEOUT_SECONDS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert horovod_timeout_s() == seconds
