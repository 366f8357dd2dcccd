"""The hook: who is called, with what, and what becomes of a training whose listener fails."""

from __future__ import annotations

import json

import numpy as np
import pytest
from recorded_runs import finished, write

from hvd_hetero.session import Session
from hvd_hetero.telemetry import Recorder, read_run


class Kept(list):
    """A listener that keeps records, and knows whether it was closed."""

    closed = 0

    def __call__(self, record):
        self.append(record)

    def close(self):
        self.closed += 1


def records(*listeners, rounds=4):
    recorder = Recorder()
    for listener in listeners:
        recorder.add(listener)
    for number in range(rounds):
        recorder(finished(number, wait_s=number - 1.0))
    return recorder


def test_a_listener_gets_each_round_once_complete_and_the_last_one_at_the_end():
    kept = Kept()
    recorder = records(kept)
    assert [record["round"] for record in kept] == [0, 1, 2]
    assert [record["wait_s"] for record in kept] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    recorder.close()
    recorder.close()
    assert (kept[-1]["round"], kept[-1]["wait_s"], kept.closed) == (3, [None, None], 1)


def test_a_record_is_the_line_of_the_file(tmp_path):
    kept = Kept()
    writer = write(tmp_path / "run.jsonl", 0)
    writer.add(kept)
    for number in range(3):
        writer(finished(number, samples_per_s=np.nan if number == 0 else 1 / 3, compute_s=[1e-9 / 3, 2e8 / 3]))
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()[1:]]
    assert [(line["round"], line["samples_per_s"], line["compute_s"]) for line in lines] == [
        (number, [None, None] if number == 0 else [0.3333333] * 2, [3.333333e-10, 6.666667e7]) for number in range(3)
    ]
    assert [list(record) for record in kept] == [list(line) for line in lines]
    assert kept[1]["samples_per_s"] == [1 / 3, 1 / 3]


def test_every_k_th_round_alone_costs_a_record():
    kept, all_of_them = Kept(), Kept()
    recorder = Recorder()
    recorder.add(kept, every=3)
    for number in range(8):
        recorder(finished(number, wait_s=number - 1.0))
    assert [(record["round"], record["wait_s"][0]) for record in kept] == [(0, 0.0), (3, 3.0), (6, 6.0)]
    assert recorder._incomplete is None
    recorder.add(all_of_them)
    recorder(finished(8))
    recorder.close()
    assert [record["round"] for record in all_of_them] == [8]


def test_a_listener_that_raises_is_closed_and_dropped_with_one_message_and_an_equal_one_goes_on(caplog):
    class Fails(Kept):
        def __call__(self, record):
            super().__call__(record)
            raise KeyError("no such figure")

    kept, failing = Kept(), Fails()
    recorder = records(kept, failing)
    assert failing.closed == 1, "at once: it may have changed the terminal, which others use"
    recorder.close()
    assert ([record["round"] for record in kept], kept.closed) == ([0, 1, 2, 3], 1)
    assert ([record["round"] for record in failing], failing.closed) == ([0], 1)
    (said,) = caplog.records
    assert said.levelname == "ERROR"
    assert "has failed and is called no more; training goes on without it" in said.getMessage()
    assert "no such figure" in caplog.text


def test_a_listener_that_changes_its_record_changes_no_other_and_ends_nothing(tmp_path):
    """As a tracker does that takes the number of the round out: ``log(record, step=record.pop("round"))``."""
    taken, ours, kept, twice = [], Kept(), Kept(), Kept()

    def takes(record):
        taken.append(record.pop("round"))
        record["samples"].clear()
        record["wait_s"][0] = "mine"

    writer = write(tmp_path / "run.jsonl", 0)
    for listener in (takes, kept, twice):
        writer.add(listener)
    writer.add(ours, ours=True)
    for number in range(4):
        writer(finished(number, wait_s=number - 1.0))
    writer.close()
    assert taken == [0, 1, 2, 3]
    assert kept == twice == ours
    assert kept[0] is not twice[0]
    assert [(record["round"], record["samples"]) for record in kept] == [(number, [10, 10]) for number in range(4)]
    assert [record["wait_s"][0] for record in kept] == [0.0, 1.0, 2.0, None]
    assert [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()[1:]] == kept


def test_a_listener_that_cannot_be_closed_keeps_no_other_from_it(caplog):
    class Stuck(Kept):
        def close(self):
            raise OSError("server is gone")

    kept = Kept()
    records(Stuck(), kept).close()
    assert kept.closed == 1
    assert "server is gone" in caplog.text


def test_an_interruption_is_no_failure_of_the_listener():
    def interrupted(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        records(interrupted)


def test_a_process_that_is_about_to_end_writes_its_file_and_calls_no_function_of_users(tmp_path):
    writer, kept, ours = write(tmp_path / "run.jsonl", 0), Kept(), Kept()
    writer.add(kept)
    writer.add(ours, ours=True)
    writer(finished(0))
    writer.last_words()
    assert (len((tmp_path / "run.jsonl").read_text().splitlines()), kept, kept.closed) == (2, [], 0)
    assert (len(ours), ours.closed) == (1, 1)


@pytest.mark.parametrize("workers", [3, 200])
def test_many_ranks_are_recorded_as_few_are(tmp_path, workers):
    """Both ways of making a record give the same figures, which are written with seven digits."""
    rng, kept = np.random.default_rng(1), Kept()
    writer = write(tmp_path / "run.jsonl", 0, workers)
    writer.add(kept)
    speeds, waits = rng.uniform(10, 1000, workers), rng.uniform(0, 1e-3, workers)
    speeds[1] = np.nan
    for number in range(2):
        limits = [0] * (workers - 1) + [57]
        writer(finished(number, workers, samples_per_s=speeds, wait_s=waits, limit=limits, compute_s=[1 / 3] * workers))
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()[1:]]
    assert kept[0]["samples_per_s"] == [None if np.isnan(v) else v for v in speeds]
    assert kept[0]["wait_s"] == waits.tolist()
    assert (kept[0]["limit"], kept[0]["compute_s"][0], "slope_s" in kept[0]) == (limits, 1 / 3, False)
    assert len(lines) == len(kept) == 2
    for line, record in zip(lines, kept, strict=True):
        assert list(line) == list(record)
        for name, figures in record.items():
            ours, theirs = np.array(figures, np.float64), np.array(line[name], np.float64)
            assert np.allclose(theirs, ours, rtol=0.6e-6, atol=0, equal_nan=True), name


# In a session.


def test_rank_0_calls_the_function_and_others_check_their_arguments_alone():
    for rank in (0, 1):
        session, kept = Session("bsp", rank, 2, 8), Kept()
        assert session.balancer.observer is None
        session.on_round(kept)
        if rank == 0:
            session.balancer.observer(finished(0))
        assert (session.balancer.observer is None) == (rank == 1)
        session.close()
        assert (len(kept), kept.closed) == ((1, 1) if rank == 0 else (0, 0))
        with pytest.raises(TypeError, match=r"on_round.* 'run\.jsonl'"):
            session.on_round("run.jsonl")
        with pytest.raises(ValueError, match=r"every.* 0"):
            session.on_round(kept, every=0)


def test_a_function_that_comes_beside_telemetry_gets_what_is_written(tmp_path):
    session, kept = Session("bsp", 0, 2, 8, tmp_path / "run.jsonl"), Kept()
    session.on_round(kept)
    session.balancer.observer(finished(0))
    session.close()
    assert [json.loads((tmp_path / "run.jsonl").read_text().splitlines()[1])] == kept


def test_a_line_of_several_rounds_is_read_as_that_many(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = write(path, 0)
    for number in (0, 3, 5):
        writer(finished(number, samples=[10, 20]))
    writer.close()
    run = read_run(path)
    assert run.round.tolist() == [0, 1, 2, 3, 4, 5]
    assert run.samples.tolist() == [[10, 20]] * 6
    lines = path.read_text().splitlines()
    assert [json.loads(line).get("rounds", 1) for line in lines[1:]] == [1, 3, 2]
    path.write_text("\n".join([*lines[:2], lines[2].replace('"rounds":3', '"rounds":4')]) + "\n")
    with pytest.raises(ValueError, match=r"line 3: rounds.* 1 .* 3\b"):
        read_run(path)
