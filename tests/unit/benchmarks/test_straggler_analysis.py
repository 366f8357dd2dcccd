"""The slowdowns of a trace that is worked out by hand."""

import gzip
import json

import numpy as np
import pytest
from script_modules import load

from hvd_hetero.tools.report.figures import figures


@pytest.fixture(scope="module")
def analysis():
    return load("straggler_analysis", "benchmarks")


def test_a_slow_pipeline_and_a_slow_worker(analysis, tmp_path):
    """Two pipelines of two stages, each in two steps: forwards of 1 s, but worker (0, 1) takes 2 s. All meet at 4 s."""
    events = []
    for step in (7, 9):
        begin_us = 1e7 * step
        for pipeline in (0, 1):
            for stage in (0, 1):
                thread = {"pid": pipeline, "tid": 10 * pipeline + stage}
                slow = 2e6 if (pipeline, stage) == (0, 1) else 1e6
                done = thread | {"ph": "X", "args": {"step": step}}
                name = {"name": f"PP rank {stage}, TP rank 0, compute"}
                events.append(thread | {"name": "thread_name", "ph": "M", "args": name})
                events.append(done | {"name": "forward-compute", "ts": begin_us + 1e6 * stage, "dur": slow})
                events.append(done | {"name": "optimizer", "ts": begin_us + 3.5e6, "dur": 0.5e6})
    path = tmp_path / "timeline.json.gz"
    path.write_bytes(gzip.compress(json.dumps(events).encode()))
    trace = analysis.Trace.read(path)
    assert trace.elapsed_s == pytest.approx([4.0, 4.0])
    assert trace.pipelines_s == pytest.approx(np.array([[3.0, 2.0]] * 2))
    assert trace.workers_s == pytest.approx(np.array([[[1.0, 2.0], [1.0, 1.0]]] * 2))
    found = figures(analysis.run_of(trace.pipelines_s, trace.elapsed_s), replayed=False)
    line = analysis.row("AR", "2 pipelines", trace.pipelines_s, found, ["zero", "one"], {"blocking_slowdown": 1.3})
    # Together they would be done in 2 / (1/3 + 1/2) = 2.4 s; 3 / 2.4 = 1.25, and by the mean 3 / 2.5.
    assert line == "| AR | 2 pipelines | 1.25 | 1.20 | 1.30 | zero, 100% of the waiting |"
