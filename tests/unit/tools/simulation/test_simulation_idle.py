"""A rank that did nothing in some round of a recorded run: the replay ends, and ends soon."""

import contextlib
import random
import signal

import numpy as np
import pytest
from report_runs import record

from hvd_hetero.policies import BSP
from hvd_hetero.telemetry import read_run
from hvd_hetero.tools.report.alternatives import alternatives
from hvd_hetero.tools.simulation import Cluster, Compute, Worker
from hvd_hetero.tools.simulation.recorded_machines import replay

LONGEST_S = 10.0  # on a machine with other work; most cases take a tenth of a second
ROUNDS = 12


@contextlib.contextmanager
def ends_soon(told):
    """Fail, and do not wait, if what is done takes longer."""

    def late(*_):
        raise TimeoutError(f"took more than {LONGEST_S} s: {told}")

    former = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)


@pytest.fixture
def changed(tmp_path):
    """A function that records a run of two ranks with some figures replaced: {(round, key): values}."""
    path = tmp_path / "run.jsonl"
    cluster = Cluster((Worker(Compute.at_speed(100.0)), Worker(Compute.at_speed(200.0))))
    record(path, cluster, BSP(), 24, ROUNDS)

    def read(changes):
        run = read_run(path)
        for (number, key), values in changes.items():
            run.columns[key][number] = values
        return run

    return read


def test_a_rank_without_a_sample_in_a_whole_round_took_no_time_in_it(changed):
    """So the rest of that round is what the other rank leaves, with the least fixed cost as with the most."""
    run = changed({(8, "samples"): [12, 0]})
    machines = replay(run)
    place = machines.kept.index(8)
    for cluster in (machines.cluster, *machines.extremes):
        rest_s = np.array(cluster.network.recorded_s)
        assert np.isfinite(rest_s).all()
        assert rest_s[place] == pytest.approx(run.elapsed_s[8] - run.compute_s[8, 0])


def test_any_idle_rounds_end_in_figures_or_an_error(changed):
    """Drawn by a seed: samples, pieces, seconds and plans of either rank, or of both, are 0 in some rounds."""
    dice, told, refused = random.Random(0), 0, []
    for _ in range(16):
        changes = {}
        for number in dice.sample(range(ROUNDS), dice.choice([1, 1, 3, ROUNDS])):
            idle = dice.choice([(0,), (1,), (0, 1)])
            for key in dice.sample(["samples", "micro_batches", "compute_s", "plan"], dice.randrange(1, 5)):
                whole = {"samples": 12, "micro_batches": 1, "compute_s": 0.1, "plan": 12}[key]
                changes[number, key] = [0 if rank in idle else whole for rank in (0, 1)]
        with ends_soon(changes):
            try:
                found = alternatives(changed(changes))
            except ValueError as error:
                refused.append(str(error))
                continue
        told += 1
        for each in found.each:
            assert np.isfinite([each.samples_per_s, each.least, each.most]).all(), changes
    assert told > 8, "most runs can be replayed"
    assert all("is not known" in each or "must be above 0" in each for each in refused), refused
