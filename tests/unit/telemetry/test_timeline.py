"""The timeline of a run, read back by a reader of the Trace Event Format that knows nothing of how it was written.

It does what Perfetto's importer does with these kinds of events: rows by ``tid``, names by metadata, slices nested by
their times. What Perfetto itself makes of a timeline is in ``test_timeline_in_perfetto``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from recorded_runs import finished, recorded, write

from hvd_hetero.telemetry import Telemetry, read_run
from hvd_hetero.telemetry.exports import trace_events, write_timeline
from hvd_hetero.tools.cli.commands import main


def read(path):
    """Return slices by the name of their row, and counters, as (time, duration or value, name, arguments)."""
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] == "ms"
    names, slices, counters = {}, defaultdict(list), defaultdict(list)
    for event in document["traceEvents"]:
        assert type(event["pid"]) is int
        assert event["pid"] > 0
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            names[event.get("tid")] = event["args"]["name"]
        elif event["ph"] == "C":
            ((series, value),) = event["args"].items()
            counters[f"{event['name']} {series}"].append((event["ts"], value))
        else:
            assert event["ph"] == "X", "no other kind is written"
            assert type(event["ts"]) is type(event["dur"]) is int
            assert event["ts"] >= 0
            assert event["dur"] > 0
            assert event["tid"] > 0, "0 is the kernel's idle thread"
            slices[event["tid"]].append((event["ts"], event["dur"], event["name"], event["args"]))
    rows = {names[thread]: sorted(found, key=lambda each: each[:2]) for thread, found in slices.items()}
    assert len(rows) == len(slices), "each row has a name of its own"
    for found in rows.values():
        for (begin, lasting, *_), (later, *_) in pairwise(found):
            assert begin + lasting <= later, "slices that overlap in part would be drawn wrong"
    return rows, counters, names[None]


def total(row, name):
    return sum(lasting for _, lasting, found, _ in row if found == name) / 1e6


def test_every_rank_has_a_row_and_its_slices_last_as_long_as_was_measured(tmp_path):
    path = tmp_path / "run.jsonl"
    work, wait = recorded(path)
    assert write_timeline(read_run(path), tmp_path / "out.json") == len(
        json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    )
    rows, counters, process = read(tmp_path / "out.json")
    assert process == "bsp, 3 ranks, 30 samples a round"
    assert set(rows) == {"rounds", "rank 0", "rank 1", "rank 2"}
    for rank in range(3):
        row = rows[f"rank {rank}"]
        assert [name for *_, name, _ in row] == ["input", "compute", "wait"] * 5 + ["input", "compute"]
        assert total(row, "compute") == pytest.approx(work[:, rank].sum(), abs=6e-6)
        assert total(row, "wait") == pytest.approx(wait[:-1, rank].sum(), abs=6e-6)
        assert total(row, "input") == pytest.approx(6 * 0.002, abs=6e-6)
    samples = [each[3]["samples"] for each in rows["rank 2"] if each[2] == "compute"]
    assert samples == [30] * 6
    assert [value for _, value in counters["speed samples/s"]] == pytest.approx([60 / 0.0734567] * 6, rel=1e-6)


def test_a_round_ends_on_all_ranks_at_once_and_lasts_as_long_as_it_took(tmp_path):
    path = tmp_path / "run.jsonl"
    recorded(path)
    write_timeline(read_run(path), tmp_path / "out.json")
    rows, *_ = read(tmp_path / "out.json")
    ends = [begin + lasting for begin, lasting, *_ in rows["rounds"]]
    assert ends == pytest.approx(np.cumsum([73456.7] * 6), abs=1)
    assert [name for *_, name, _ in rows["rounds"]] == [f"round {number}" for number in range(6)]
    for rank in range(3):
        assert [b + d for b, d, name, _ in rows[f"rank {rank}"] if name == "wait"] == ends[:-1]


def test_what_does_not_fit_into_its_round_is_cut_and_told_in_full(tmp_path):
    writer = write(tmp_path / "run.jsonl", 0, 1)
    for number in range(3):
        writer(finished(number, 1, 0.1, compute_s=0.2, input_s=0.01, wait_s=0.05))
    writer.close()
    write_timeline(read_run(tmp_path / "run.jsonl"), tmp_path / "out.json")
    rows, *_ = read(tmp_path / "out.json")
    first = [each for each in rows["rank 0"] if each[0] < 100_000]
    assert [(begin, lasting, name) for begin, lasting, name, _ in first] == [
        (0, 50_000, "compute"),
        (50_000, 50_000, "wait"),
    ]
    assert first[0][3]["seconds"] == 0.2


def test_a_part_of_the_rounds_by_the_command(tmp_path, capsys):
    path, out = tmp_path / "run.jsonl", tmp_path / "out.json"
    recorded(path)
    assert main(["timeline", str(path), str(out), "--rounds", "2:4"]) == 0
    rows, *_ = read(out)
    assert [name for *_, name, _ in rows["rounds"]] == ["round 2", "round 3"]
    assert rows["rounds"][0][0] == 0
    assert "open it in https://ui.perfetto.dev" in capsys.readouterr().err


def test_a_record_of_some_rounds_is_drawn_and_said(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    recorded(path, settings=Telemetry(path, every=2))
    assert main(["timeline", str(path), str(tmp_path / "out.json")]) == 0
    assert "1 round of 2 is recorded. The rounds that are recorded follow each other" in capsys.readouterr().err
    rows, *_ = read(tmp_path / "out.json")
    assert [name for *_, name, _ in rows["rounds"]] == ["round 0", "round 2", "round 4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "5"], "must be two numbers with a colon between, such as \"100:200\", got '5'"),
        (["--rounds", "50:60"], "holds no such round; its rounds are 0 to 5"),
    ],
)
def test_wrong_rounds_are_named(tmp_path, capsys, arguments, message):
    recorded(tmp_path / "run.jsonl")
    assert main(["timeline", str(tmp_path / "run.jsonl"), str(tmp_path / "out.json"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_more_events_than_a_browser_opens_are_refused_with_the_rounds_that_fit(tmp_path, monkeypatch):
    recorded(tmp_path / "run.jsonl")
    run = read_run(tmp_path / "run.jsonl")
    monkeypatch.setattr(trace_events, "MOST_EVENTS", 40)
    with pytest.raises(ValueError, match="take fewer rounds: --rounds 0:3"):
        write_timeline(run, tmp_path / "out.json")


def test_a_run_without_times_is_refused(tmp_path):
    recorded(tmp_path / "run.jsonl")
    run = read_run(tmp_path / "run.jsonl")
    with pytest.raises(ValueError, match="elapsed_s must be at least 0 in every round"):
        write_timeline(replace(run, elapsed_s=-run.elapsed_s), tmp_path / "out.json")


def test_a_second_recording_in_the_place_of_the_output_is_kept(tmp_path, capsys):
    for name in ("run.1.jsonl", "run.2.jsonl"):
        recorded(tmp_path / name)
    kept = (tmp_path / "run.2.jsonl").read_bytes()
    assert main(["timeline", str(tmp_path / "run.1.jsonl"), str(tmp_path / "run.2.jsonl")]) == 2
    assert "OUT.json names" in (said := capsys.readouterr().err)
    assert "exists and is no timeline; name another file, or move it" in said
    with pytest.raises(ValueError, match=r"path names .* exists and is no timeline"):
        write_timeline(read_run(tmp_path / "run.1.jsonl"), tmp_path / "run.2.jsonl")
    assert (tmp_path / "run.2.jsonl").read_bytes() == kept


def test_an_earlier_timeline_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    recorded(tmp_path / "run.jsonl")
    run, out = read_run(tmp_path / "run.jsonl"), tmp_path / "out.json"
    out.touch()
    write_timeline(run, out)
    before = out.read_bytes()

    def fails(run):
        yield {"ph": "M"}
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(trace_events, "events", fails)
        with pytest.raises(KeyboardInterrupt):
            write_timeline(run, out)
    assert out.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.json", "run.jsonl"]
    write_timeline(run.take(run.round < 2), out)
    assert len(out.read_bytes()) < len(before)
    assert out.stat().st_mode == (tmp_path / "run.jsonl").stat().st_mode, "as any file that is written"
