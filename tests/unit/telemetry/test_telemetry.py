"""A run that is written and read back is the same run, and trouble with the file never reaches the training."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from recorded_runs import finished as a_round
from script_modules import load

from hvd_hetero.rounds import FinishedRound, RoundPlan, RoundReport, RoundTable
from hvd_hetero.telemetry import VERSION, Telemetry, TelemetryWriter, read_run
from hvd_hetero.telemetry.records import Recorder

rounds_figure = load("demo_picture", "examples").rounds_figure

WORKERS = 2


DEVICE = {
    "once_s": 0.0625,
    "fixed_samples": 12.5, "limit": 57, "slope_s": 0.001, "intercept_s": -0.002, "saturation": 16,
    "throttled": 0.25, "quota_cores": 1.5, "contended": 0.125, "stolen": 0.03125, "stalled": 0.5, "faults_per_s": 3,
    "collecting": 0.0625, "clock": 0.75, "sent_mb_s": 12.5,
    "work": 7.5, "cost_number": 0.25, "cost_length": 0.5, "cost_square": 0.125, "cost_padded": 0.125,
    "cost_padded_square": 0.125, "padding": 0.375,
    "by_number": 1.5, "memory_base_mib": 1024.0, "memory_slope_mib": 450.0, "memory_peak_mib": 11500.0,
}  # fmt: skip


def finished(number: int, wait_s=(0.5, 0.25), device: bool = False) -> FinishedRound:
    plan = RoundPlan.of([10 + number, 20])
    rows = [
        RoundReport(
            samples=plan.samples[rank], micro_batches=1, compute_s=1.0 + rank, input_s=0.125, wait_s=wait_s[rank],
            samples_per_s=float("nan") if number == 0 else 9.5, cpu=0.75, memory=0.5,
            fingerprint=3, settings=4, parameter_norm=1.5, **(DEVICE if rank == 1 and device else {}),
        ).vector(rank, WORKERS)
        for rank in range(WORKERS)
    ]  # fmt: skip
    table, noise_scale = RoundTable(np.sum(rows, axis=0), WORKERS), 640.5 if device else float("nan")
    return FinishedRound(number, number // 3, plan, table, 2.5, noise_scale)


def write(path, rounds: int, device: bool = False) -> None:
    writer = TelemetryWriter(path, policy="bsp", workers=WORKERS, global_batch=30)
    for number in range(rounds):
        # The waiting that travels with round r is that of round r - 1.
        writer(finished(number, (number - 1.0, 2.0 * (number - 1)), device and number > 1))
    writer.close()
    writer.close()


def test_a_former_run_is_kept_under_another_name(tmp_path):
    path = tmp_path / "run.jsonl"
    for rounds in (1, 2, 3):
        write(path, rounds)
    kept = {file.name: len(read_run(file).round) for file in tmp_path.iterdir()}
    assert kept == {"run.1.jsonl": 1, "run.2.jsonl": 2, "run.jsonl": 3}


def test_jobs_that_begin_at_the_same_moment_on_one_path_lose_no_run(tmp_path):
    """Threads in the place of jobs; each has a number of rounds of its own."""
    jobs = 8
    for time in range(10):
        path, begin = tmp_path / str(time) / "run.jsonl", threading.Barrier(jobs)

        def job(rounds, path=path, begin=begin):
            begin.wait(10)
            write(path, rounds)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(job, range(1, jobs + 1)))
        kept = [len(read_run(file).round) for file in path.parent.iterdir() if file.stat().st_size]
        assert sorted(kept) == list(range(1, jobs + 1))


def test_a_run_is_read_back_as_it_was(tmp_path):
    path = tmp_path / "new" / "run.jsonl"
    write(path, 5)
    run = read_run(path)
    assert (run.policy, run.workers, run.global_batch) == ("bsp", 2, 30)
    assert run.round.tolist() == [0, 1, 2, 3, 4]
    assert run.epoch.tolist() == [0, 0, 0, 1, 1]
    assert run.samples[:, 0].tolist() == [10, 11, 12, 13, 14]
    assert run.compute_s.tolist() == [[1.0, 2.0]] * 5
    assert np.isnan(run.samples_per_s[0]).all()
    assert run.samples_per_s[1:].tolist() == [[9.5, 9.5]] * 4


def test_the_waiting_of_a_round_stands_in_its_own_line_and_is_unknown_for_the_last(tmp_path):
    write(tmp_path / "run.jsonl", 4)
    wait_s = read_run(tmp_path / "run.jsonl").wait_s
    assert wait_s[:3].tolist() == [[0, 0], [1, 2], [2, 4]]
    assert np.isnan(wait_s[3]).all()


def test_throughput_and_waiting_share_follow_from_the_figures(tmp_path):
    write(tmp_path / "run.jsonl", 4)
    run = read_run(tmp_path / "run.jsonl")
    assert run.throughput == pytest.approx(sum(30 + r for r in range(1, 4)) / (3 * 2.5))
    assert run.waiting_share == pytest.approx([3 / 5, 6 / 5])
    assert run.after(2).round.tolist() == [2, 3]


def test_the_start_counts_in_no_figure_of_a_run_nor_in_a_picture(tmp_path):
    """Round 0 builds graphs and opens connections; it made a balanced run look twice as fast as one of equal shares."""
    write(tmp_path / "run.jsonl", 20)
    steady = read_run(tmp_path / "run.jsonl")
    slow = steady.elapsed_s.copy()
    slow[0] += 100.0
    run = steady.replace(elapsed_s=slow)
    assert run.throughput == steady.throughput
    assert run.waiting_share.tolist() == steady.waiting_share.tolist()
    figure = rounds_figure({"mine": run}, warm_up=5)
    assert figure.axes[0].get_title() == f"mine:  {run.after(5).throughput:.0f} samples/s"
    assert figure.get_supxlabel().endswith("without the start-up: the first 5 rounds.")
    assert rounds_figure({"mine": run}).get_supxlabel().endswith("without the start-up: the first round.")
    alone = run.replace(**{name: getattr(run, name)[:1] for name in ("round", "elapsed_s", "samples", "wait_s")})
    assert alone.throughput == pytest.approx(30 / 102.5), "round 0 alone is all that there is"


def test_every_key_of_the_documented_schema_is_written_and_no_other(tmp_path, request):
    writer = TelemetryWriter(tmp_path / "run.jsonl", policy="bsp", workers=WORKERS, global_batch=30)
    writer.recovered_s = 8.25
    writer(finished(2, device=True))
    writer.close()
    header, line = (json.loads(text) for text in (tmp_path / "run.jsonl").read_text().splitlines())
    document = (request.config.rootpath / "docs" / "telemetry.md").read_text()
    documented = {row.split("`")[1] for row in document.splitlines() if row.startswith("| `")}
    assert set(header) | set(line) | {"rounds"} == documented  # the last of a line that tells of several


def test_limits_and_curves_are_written_where_there_are_any_and_read_as_zero_elsewhere(tmp_path):
    write(tmp_path / "run.jsonl", 4, device=True)
    run = read_run(tmp_path / "run.jsonl")
    for name, value in DEVICE.items():
        assert getattr(run, name).tolist() == [[0, 0]] * 2 + [[0, value]] * 2
    assert run.noise_scale.tolist() == [0, 0, 640.5, 640.5]
    write(tmp_path / "plain.jsonl", 2)
    assert "saturation" not in (tmp_path / "plain.jsonl").read_text()
    assert run.after(3).limit.tolist() == [[0, 57]]


def test_a_run_recorded_before_there_were_limits_is_read(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, 3)
    path.write_text(path.read_text().replace(',"headroom":0.1', ""))
    assert not read_run(path).limit.any()
    assert not read_run(path).throttled.any()


def test_a_line_cut_short_at_the_end_is_left_out(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, 4)
    path.write_text(path.read_text()[:-20])
    assert len(read_run(path).round) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no complete line"),
        ("not json\n", "schema"),
        ('{"some": "json"}\n', "schema"),
        ('{"schema":"hvd-hetero/telemetry","version":99}\n', f"version 99.*version {VERSION}"),
    ],
)
def test_a_file_that_is_something_else_is_named(tmp_path, text, message):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(path)


@pytest.mark.parametrize("fails", ["from the start", "later", "on closing"])
def test_a_full_disk_ends_the_telemetry_with_one_warning(tmp_path, caplog, fails):
    path = "/dev/full" if fails == "from the start" else tmp_path / "run.jsonl"
    writer = TelemetryWriter(path, policy="bsp", workers=WORKERS, global_batch=30)

    class Full:
        def write(self, text: str) -> int:
            if fails == "later":
                raise OSError(28, "No space left on device")
            return len(text)

        def flush(self) -> None:
            pass

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    if fails != "from the start":
        writer.file._file = Full()
    for number in range(5):
        writer(finished(number))
    writer.close()
    writer.close()
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text
    assert "No space left" in caplog.text


@pytest.mark.parametrize(
    ("path", "kind", "why"),
    [
        ("file/run.jsonl", FileExistsError, "its folder is a file"),
        ("file/sub/run.jsonl", NotADirectoryError, "Not a directory"),
        ("folder", IsADirectoryError, "Is a directory"),
        ("/proc/none/run.jsonl", FileNotFoundError, "No such file or directory"),
    ],
)
def test_a_path_that_cannot_be_written_is_told_at_once(tmp_path, path, kind, why):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(kind) as caught:
        TelemetryWriter(tmp_path / path, policy="bsp", workers=1, global_batch=1)
    assert str(caught.value) == (
        f"telemetry must be a file that rank 0 can write, got '{tmp_path / path}': {why}; name another file, or leave "
        "telemetry out"
    )


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        *(({"path": path}, ValueError, "telemetry") for path in ("", ".", "/", "a\0b")),
        ({"path": 3}, TypeError, "telemetry"),
        ({"every": 0}, ValueError, "every"),
        ({"every": 1.5}, TypeError, "every"),
    ],
)
def test_settings_that_cannot_be_are_told_at_once(arguments, error, named):
    with pytest.raises(error, match=named):
        Telemetry(**{"path": "run.jsonl", **arguments})


def test_the_picture_shows_every_rank_of_every_run(tmp_path):
    write(tmp_path / "run.jsonl", 30)
    run = read_run(tmp_path / "run.jsonl")
    figure = rounds_figure({"first": run, "second": run}, "title")
    assert len(figure.axes) == 4
    for axis in figure.axes:
        assert len(axis.lines) == WORKERS
    figure.savefig(tmp_path / "rounds.png")
    assert (tmp_path / "rounds.png").stat().st_size > 10_000


@pytest.mark.parametrize("kind", [np.int64, np.float64])
def test_columns_of_usual_numbers_and_of_odd_ones_are_read_alike(tmp_path, kind):
    """Whole numbers written as 3.0, and unknown figures."""
    path = tmp_path / "run.jsonl"
    write(path, 2)
    header, first, second = path.read_text().splitlines()
    key = "samples" if kind is np.int64 else "compute_s"
    odd = json.loads(first) | {key: [10.0, 20] if kind is np.int64 else [None, 2]}
    path.write_text("\n".join([header, json.dumps(odd), second]) + "\n")
    column = getattr(read_run(path), key)
    assert column.dtype == kind
    assert column[1].tolist() == ([11, 20] if kind is np.int64 else [1.0, 2.0])
    np.testing.assert_array_equal(column[0], [10, 20] if kind is np.int64 else [np.nan, 2.0])
    path.write_text("\n".join([header, json.dumps(odd | {key: [1]}), second]) + "\n")
    with pytest.raises(ValueError, match=f"line 2: {key}"):
        read_run(path)


def test_times_that_a_device_tells_a_round_later_are_written_with_their_round():
    """Rank 0 computes on a GPU and tells of the round before; rank 1 has none."""
    records: list[dict] = []
    recorder = Recorder()
    recorder.add(records.append)
    nan = float("nan")
    late = {"compute_s": [nan, 1.0, 2.0, 3.0], "input_s": [nan, 0.1, 0.2, 0.3], "lap_s": [nan, nan, 2.5, 3.5]}
    for number in range(4):
        own = {"compute_s": 10.0 + number, "input_s": 0.5, "lap_s": 0.0}
        figures = {name: (told[number], own[name]) for name, told in late.items()}
        recorder(a_round(number, elapsed_s=9.0, wait_s=(0.25 * number, nan), **figures))
    recorder.close()
    assert [record["compute_s"] for record in records] == [[1.0, 10.0], [2.0, 11.0], [3.0, 12.0], [None, 13.0]]
    assert [record["input_s"] for record in records] == [[0.1, 0.5], [0.2, 0.5], [0.3, 0.5], [None, 0.5]]
    assert [record["wait_s"] for record in records] == [[0.25, None], [0.5, None], [0.75, None], [None, None]]
    assert [record["elapsed_s"] for record in records] == [9.0, 2.5, 3.5, 9.0], "the first lap has no beginning"
