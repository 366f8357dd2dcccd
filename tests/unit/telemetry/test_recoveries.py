"""How long a change of ranks took: in the line of the first round after it, whatever is left out, and read back."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from recorded_runs import finished, recovery_of, write

from hvd_hetero.telemetry import Telemetry, read_run


def recovered(path, workers=2, at=0, rounds=4, every=1):
    writer = write(Telemetry(path, every=every), 0, workers)
    for number in range(rounds):
        if number == at:
            writer.recovery = recovery_of(workers)
        writer(finished(number, workers))
    return writer


def test_a_recovery_is_read_back_as_it_was_measured(tmp_path):
    recovered(tmp_path / "run.jsonl", workers=3, at=1).close()
    run = read_run(tmp_path / "run.jsonl")
    (recovery,) = run.recoveries
    assert (recovery.round, recovery.joined.tolist()) == (1, [False, False, True])
    assert recovery.noticed_at[0] == 1764137000.25, "to the millisecond, and not in seven digits"
    np.testing.assert_array_equal(recovery.rendezvous_s, [8.0, 8.0, np.nan])
    np.testing.assert_array_equal(recovery.start_s, [np.nan, np.nan, 7.5])
    np.testing.assert_array_equal(np.nansum(list(recovery.steps.values()), axis=0), recovery.total_s)
    assert (run.take(slice(0, 2)).recoveries, run.after(2).recoveries) == ((recovery,), ())


def test_the_steps_of_many_ranks_are_kept_one_by_one(tmp_path):
    recovered(tmp_path / "run.jsonl", workers=70).close()
    (recovery,) = read_run(tmp_path / "run.jsonl").recoveries
    assert recovery.joined.nonzero()[0].tolist() == [69]


def test_a_run_without_one_has_none(tmp_path):
    write(tmp_path / "run.jsonl", 3).close()
    assert "recovery" not in (tmp_path / "run.jsonl").read_text()
    assert read_run(tmp_path / "run.jsonl").recoveries == ()


def test_the_first_round_after_it_is_recorded_where_only_some_rounds_are(tmp_path):
    heard = []
    writer = recovered(tmp_path / "run.jsonl", at=3, rounds=3, every=4)
    writer.add(heard.append, every=100)
    writer.recovery = recovery_of(2)
    for number in range(3, 9):
        writer(finished(number))
    writer.close()
    run = read_run(tmp_path / "run.jsonl")
    assert run.round.tolist() == [0, 3, 4, 8]
    assert [recovery.round for recovery in run.recoveries] == [3]
    assert [record["round"] for record in heard] == [3]


def test_a_listener_may_change_its_record_of_a_recovery(tmp_path):
    writer = write(tmp_path / "run.jsonl", 0)
    kept = []
    writer.add(lambda record: record.get("recovery", {"leave_s": []})["leave_s"].clear())
    writer.add(lambda record: kept.append(copy.deepcopy(record)))
    writer.recovery = recovery_of(2)
    writer(finished(0))
    writer(finished(1))
    writer.close()
    assert [record.get("recovery") for record in kept] == [recovery_of(2), None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda told: 3, r"line 2: recovery\b.* 3\b"),
        (lambda told: {**told, "leave_s": [0.5]}, r"recovery\.leave_s.* 2 .*\[0\.5\]"),
        (lambda told: {**told, "leave_s": [0.5, "1"]}, r"recovery\.leave_s.*null"),
        (lambda told: {**told, "total_s": [0.5, True]}, r"recovery\.total_s.* True"),
        (lambda told: {**told, "total_s": [0.5, -5]}, r"recovery\.total_s.* 0 "),
        (lambda told: {**told, "total_s": [0.5, 10**400]}, "line 2"),
        (lambda told: {k: v for k, v in told.items() if k != "start_s"}, r"recovery\.start_s.*nothing"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path, change, message):
    path = tmp_path / "run.jsonl"
    recovered(path).close()
    header, line, *rest = path.read_text().splitlines()
    row = json.loads(line)
    row["recovery"] = change(row["recovery"])
    path.write_text("\n".join([header, json.dumps(row), *rest, ""]))
    with pytest.raises(ValueError, match=message):
        read_run(path)
