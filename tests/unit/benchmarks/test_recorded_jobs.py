"""Recorded jobs of others, as cluster: each round is one moment of the recording on all workers."""

import pytest
from script_modules import load


@pytest.fixture(scope="module")
def alibaba():
    return load("alibaba", "benchmarks", "benchmarks/papers")


def job(path, records):
    """Write a job: (worker, time stamp, batch time) per line."""
    lines = [f"{k},{worker},9,{time},{value}" for k, (worker, time, value) in enumerate(records)]
    path.write_text("\n".join([",worker,gpu,time,batch_time_norm", *lines]) + "\n")
    return path


def seconds(cluster):
    """Return every worker's batch times, round by round, in the recording's thousandths."""
    found = []
    for worker in cluster.workers:
        (variation,) = worker.variation
        found.append([round(1e3 * 100 * worker.compute.slope_s * f) for f in variation.factors])
    return found


def test_a_worker_that_begins_late_meets_the_others_at_the_same_moments(alibaba, tmp_path):
    """All are slow at stamp 21; shifted by a record, worker 0 would be slow a round before the others."""
    times = {1: 100, 11: 100, 21: 300, 31: 100, 41: 100}
    records = [(w, t, v) for w in (0, 1, 2) for t, v in times.items() if not (w == 0 and t == 1)]
    cluster, rounds = alibaba.cluster(job(tmp_path / "job.csv", records))
    assert rounds == 4
    assert seconds(cluster) == [[100, 300, 100, 100]] * 3
