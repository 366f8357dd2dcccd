"""A recovery in the telemetry: the seconds that the first round after it records."""

from __future__ import annotations

import json

from recorded_runs import finished, write

from hvd_hetero.telemetry import Telemetry, read_run


def test_the_first_round_after_it_is_recorded_where_only_some_rounds_are_and_reads_back(tmp_path):
    heard = []
    writer = write(Telemetry(tmp_path / "run.jsonl", every=4), 3)
    writer.add(heard.append, every=100)
    writer.recovered_s = 8.875
    for number in range(3, 9):
        writer(finished(number))
    writer.close()
    run = read_run(tmp_path / "run.jsonl")
    assert run.round.tolist() == [0, 3, 4, 8]
    assert run.recovered_s.tolist() == [0.0, 8.875, 0.0, 0.0]
    assert [record["round"] for record in heard] == [3]


def test_the_steps_that_older_releases_wrote_are_passed_over(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, 2).close()
    header, first, *rest = path.read_text().splitlines()
    first = json.dumps(json.loads(first) | {"recovery": {"noticed_s": [0.25, None], "total_s": [8.75, 7.5]}})
    path.write_text("\n".join([header, first, *rest, ""]))
    assert read_run(path).recovered_s.tolist() == [0.0, 0.0]
