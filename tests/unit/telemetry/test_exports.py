"""What other programs get of a round: named figures, a file for Prometheus, scalars for TensorBoard."""

from __future__ import annotations

import contextlib
import os
import sys
import types

import pytest
from prometheus_client.parser import text_string_to_metric_families
from recorded_runs import finished

from hvd_hetero.telemetry import Recorder
from hvd_hetero.telemetry.exports import PrometheusFile, TensorBoard, figures


def feed(listener, rounds=4, workers=2, close=True, **told):
    recorder = Recorder()
    recorder.add(listener)
    for number in range(rounds):
        recorder(finished(number, workers, 2.0, **{"wait_s": 0.5, **told}))
    if close:
        recorder.close()


def test_figures_are_rates_shares_and_each_rank():
    found = []
    feed(lambda record: found.append(figures(record)), samples=[30, 10], compute_s=[1.0, 1.5])
    assert found[0] == {
        "samples_per_s": 20.0, "waiting_share": 0.25, "batch/rank_0": 30.0, "batch/rank_1": 10.0,
        "compute_s/rank_0": 1.0, "compute_s/rank_1": 1.5, "input_s/rank_0": 1.0, "input_s/rank_1": 1.0,
        "wait_s/rank_0": 0.5, "wait_s/rank_1": 0.5,
    }  # fmt: skip
    assert "waiting_share" not in found[-1], "of the last round it is not known"
    assert not any(name.startswith("wait_s") for name in found[-1])


def test_many_ranks_have_no_curve_each():
    found = []
    feed(lambda record: found.append(figures(record)), workers=100, samples=[10] * 99 + [2])
    assert (found[0]["batch/least"], found[0]["batch/median"], found[0]["batch/most"]) == (2.0, 10.0, 10.0)
    assert len(found[0]) == 2 + 4 * 3


# Prometheus.


def read(path):
    """What Prometheus's own parser finds: values by name and rank."""
    found = {}
    for family in text_string_to_metric_families(path.read_text()):
        assert family.documentation
        found |= {(sample.name, sample.labels.get("rank")): sample.value for sample in family.samples}
    return found


def test_the_file_for_prometheus_has_counters_and_gauges_of_the_training(tmp_path):
    path = tmp_path / "train.prom"
    feed(PrometheusFile(path), samples=[30, 10], compute_s=[1.0, 1.5])
    assert read(path) == {
        ("hvd_hetero_round", None): 3.0,
        ("hvd_hetero_samples_per_second", None): 20.0,
        ("hvd_hetero_batch_samples", "0"): 30.0,
        ("hvd_hetero_batch_samples", "1"): 10.0,
        ("hvd_hetero_rounds_total", None): 4.0,
        ("hvd_hetero_samples_total", None): 160.0,
        ("hvd_hetero_compute_seconds_total", "0"): 4.0,
        ("hvd_hetero_compute_seconds_total", "1"): 6.0,
        ("hvd_hetero_input_seconds_total", "0"): 4.0,
        ("hvd_hetero_input_seconds_total", "1"): 4.0,
        ("hvd_hetero_wait_seconds_total", "0"): 1.5,
        ("hvd_hetero_wait_seconds_total", "1"): 1.5,
    }
    assert os.listdir(tmp_path) == ["train.prom"], "nothing is left of how it was written"


def test_labels_tell_trainings_of_one_machine_apart(tmp_path):
    path = tmp_path / "train.prom"
    feed(PrometheusFile(path, labels={"run": "7"}))
    assert 'hvd_hetero_batch_samples{rank="1",run="7"} 10.0' in path.read_text()


def test_the_file_is_written_every_so_many_seconds_and_at_the_end(tmp_path):
    path, times = tmp_path / "train.prom", iter([0.0, 5.0, 15.0, 16.0, 17.0])
    listener = PrometheusFile(path, clock=lambda: next(times))
    seen = []
    feed(listener, 5, close=False)  # which hands out four records
    seen.append(read(path)["hvd_hetero_round", None])
    listener.close()
    seen.append(read(path)["hvd_hetero_round", None])
    assert seen == [2.0, 3.0]


def test_other_ranks_write_no_file(tmp_path):
    PrometheusFile(tmp_path / "train.prom").close()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"every_s": -1}, ValueError, r"every_s.* -1"),
        ({"every_s": float("nan")}, ValueError, r"every_s.* nan"),
        ({"every_s": "x"}, TypeError, r"every_s.* 'x'"),
        ({"path": None}, TypeError, r"path.* None.*PrometheusFile"),
        ({"path": "train.txt"}, ValueError, r"path.*NAME\.prom.*'train\.txt'"),
        ({"path": ".prom"}, ValueError, r"path.*NAME\.prom.*'\.prom'"),
        ({"labels": {"run": 7}}, TypeError, r"labels.* 'run': 7.*'run': '7'"),
        ({"labels": {"rank": "0"}}, ValueError, r"labels.* 'rank'.*rename"),
        ({"labels": {"bad-name": "x"}}, ValueError, r"labels.* 'bad-name'.*rename"),
        ({"labels": {"__x": "x"}}, ValueError, r"labels.* '__x'.*rename"),
    ],
)
def test_what_cannot_work_is_told_when_the_file_is_made(settings, error, message):
    with pytest.raises(error, match=message):
        PrometheusFile(**{"path": "train.prom", **settings})


def test_a_file_that_cannot_be_written_is_tried_again_with_one_warning(tmp_path, caplog):
    """The folder is mounted late."""
    path = tmp_path / "late" / "train.prom"
    times = iter([0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0])
    listener, recorder = PrometheusFile(path, clock=lambda: next(times)), Recorder()
    recorder.add(listener)

    def train(numbers):
        for number in numbers:
            recorder(finished(number))

    train(range(4))
    (said,) = caplog.records
    assert (said.levelname, said.exc_info) == ("WARNING", None)
    assert "train.prom: No such file or directory; it is tried again every 15 s, and training" in said.getMessage()
    path.parent.mkdir()
    train(range(4, 6))
    assert read(path)["hvd_hetero_rounds_total", None] == 5.0, "all that it has seen"
    path.unlink()
    path.parent.rmdir()
    recorder.close()
    assert len(caplog.records) == 2, "one for each time that it becomes impossible"


def test_a_library_that_is_missing_is_told_when_the_listener_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install prometheus-client"):
        PrometheusFile(tmp_path / "train.prom")
    with pytest.raises(ModuleNotFoundError, match=r"pip install tensorboard"):
        TensorBoard(tmp_path)


# TensorBoard.


def test_without_pytorch_tensorflow_writes_outside_of_its_graphs(monkeypatch):
    scopes, told, closed = [], [], []

    @contextlib.contextmanager
    def scope(name):
        scopes.append(name)
        yield
        scopes.remove(name)

    writer = types.SimpleNamespace(as_default=scope, close=lambda: closed.append(True))
    tensorflow = types.ModuleType("tensorflow")
    tensorflow.init_scope = lambda: scope("eager")
    tensorflow.summary = types.SimpleNamespace(
        create_file_writer=lambda folder: told.append(folder) or writer,
        scalar=lambda name, value: told.append((name, value, *scopes)),
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    feed(TensorBoard("runs/1"), rounds=2, samples=[30, 10])
    assert told[0] == "runs/1"
    assert ("hvd_hetero/batch/rank_1", 10.0, "eager", 1) in told
    assert closed == [True]


def test_a_folder_that_is_no_path_is_told_when_the_listener_is_made(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(TypeError, match=r"folder.* None.*TensorBoard"):
        TensorBoard(None)


def test_other_ranks_open_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    TensorBoard(tmp_path).close()
    assert not os.listdir(tmp_path)


def test_tensorboard_reads_what_is_written(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("torch.utils.tensorboard")
    feed(TensorBoard(tmp_path), samples=[30, 10])
    found = reader.EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in found.Scalars("hvd_hetero/samples_per_s")] == [(k, 20.0) for k in range(4)]


# The examples of the documentation.


def test_the_documented_listeners_for_mlflow_and_wandb_log_the_figures(request, monkeypatch):
    """Its ten lines run as printed, with an object in the place of the library."""
    document = (request.config.rootpath / "docs" / "telemetry.md").read_text()
    for library, logged in (("mlflow", "log_metrics"), ("wandb", "log")):
        told = []
        module = types.ModuleType(library)
        module.start_run = module.init = lambda **_: None
        module.active_run, module.run = lambda: None, None
        setattr(module, logged, lambda values, step, told=told: told.append((step, values["samples_per_s"])))
        monkeypatch.setitem(sys.modules, library, module)
        (code,) = (block for block in document.split("```python\n") if f"import {library}" in block)
        recorder = Recorder()
        balance = types.SimpleNamespace(on_round=recorder.add)
        exec(code.partition("```")[0], {"balance": balance})
        for number in range(21):
            recorder(finished(number, 2, 2.0))
        recorder.close()
        assert told == [(0, 10.0), (10, 10.0), (20, 10.0)]
