"""NARX: the network against numerical derivatives, its training, its life in the background, and its warm starts."""

import copy
import json
import math
import os
import pickle
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from scipy.optimize import least_squares

from hvd_hetero.prediction import EMA, NARX
from hvd_hetero.prediction.narx import neural_network, training


def driven(rounds, seed=0, scale=500.0, noise=0.03):
    """Speeds proportional to the CPU, which changes every six rounds, with relative noise."""
    rng = np.random.default_rng(seed)
    cpu = np.repeat(rng.uniform(0.2, 1.0, rounds // 6 + 1), 6)[:rounds]
    speeds = scale * cpu * np.exp(rng.normal(0, noise, rounds))
    return [(float(v), float(c), float(m)) for v, c, m in zip(speeds, cpu, rng.uniform(0.4, 0.6, rounds), strict=True)]


def errors(p, rounds, start=0):
    out = []
    for k, (v, c, m) in enumerate(rounds):
        if k >= max(1, start):
            out.append(p.predict(c, m) - v)
        p.update(v, c, m)
    return np.array(out)


def rms(x):
    return float(np.sqrt(np.mean(x**2)))


def test_the_network_has_fewer_than_twenty_parameters_and_one_formula():
    assert neural_network.PARAMETERS == len(neural_network.start(0)) == 13
    theta, u = np.array(neural_network.start(3)), np.linspace(-1, 1, 4)
    a, b, w = theta[:8].reshape(2, 4), theta[8:10], theta[10:12]
    expected = theta[12] + w @ np.tanh(a @ u + b)
    assert neural_network.forward(tuple(theta), tuple(u)) == pytest.approx(expected)
    assert neural_network.forward_rows(theta, u[None])[0][0] == pytest.approx(expected)


def test_derivatives_equal_numerical_ones():
    theta, u = np.array(neural_network.start(1)), np.random.default_rng(2).normal(size=(7, 4))
    _, slopes = neural_network.forward_rows(theta, u)
    for k in range(neural_network.PARAMETERS):
        step = np.eye(neural_network.PARAMETERS)[k] * 1e-6
        plus, minus = (neural_network.forward_rows(theta + s, u)[0] for s in (step, -step))
        np.testing.assert_allclose(slopes[:, k], (plus - minus) / 2e-6, atol=1e-8)


def test_the_fit_is_as_good_as_another_methods():
    rng = np.random.default_rng(4)
    u = rng.normal(0, 0.5, (200, 4))
    y = np.tanh(u @ rng.normal(size=4)) + 0.3 * u[:, 0] + rng.normal(0, 0.05, 200)
    start = np.array(neural_network.start(0))
    ours = neural_network.fit(tuple(start), u, y, pull=0.01)
    theirs = least_squares(
        lambda t: np.concatenate([(neural_network.forward_rows(t, u)[0] - y) / y.std(), 0.1 * (t - start)]), start
    )
    assert ours.loss <= 2 * theirs.cost / 200 * 1.1 + 1e-3


def test_a_fit_ends_early_when_the_loss_no_longer_falls_and_gives_way_between_steps():
    rng, rests = np.random.default_rng(5), []
    u, noise = rng.normal(size=(100, 4)), rng.normal(size=100)
    neural_network.fit(neural_network.start(0), u, noise, pull=1.0, max_steps=500, give_way=lambda: rests.append(None))
    assert 2 < len(rests) < 100
    rests.clear()
    neural_network.fit(neural_network.start(0), u, u[:, 0], pull=0.01, max_steps=2, give_way=lambda: rests.append(None))
    assert len(rests) < 8


def test_a_fit_of_what_is_no_number_is_the_start():
    fit = neural_network.fit(neural_network.start(0), np.full((30, 4), np.nan), np.ones(30), pull=1.0)
    assert fit.parameters == neural_network.start(0)


def test_parameters_that_the_data_say_nothing_about_stay():
    fit = neural_network.fit(neural_network.start(0), np.zeros((30, 4)), np.zeros(30), pull=1.0)
    assert fit.parameters[:8] == pytest.approx(neural_network.start(0)[:8])
    assert neural_network.forward(fit.parameters, (0.0,) * 4) == pytest.approx(0.0, abs=1e-3)


def test_ema_until_500_rounds_from_scratch_and_the_network_from_then_on():
    narx, ema = NARX(warm_start=None, background=False), EMA()
    for k, (v, c, m) in enumerate(driven(502)):
        if 0 < k < 500:
            assert narx.predict(c, m) == ema.predict()
            assert not narx.trained
        narx.update(v, c, m)
        ema.update(v)
    assert narx.trained
    assert narx.predict(0.3, 0.5) != ema.predict()


def test_from_scratch_it_comes_to_beat_ema_by_far_where_the_cpu_decides():
    rounds = driven(900)
    narx = errors(NARX(warm_start=None, background=False), rounds, 520)
    ema = errors(EMA(), rounds, 520)
    assert rms(narx) < 0.4 * rms(ema)


@pytest.mark.parametrize("scale", [0.01, 7.0, 1e6])
def test_the_shipped_parameters_beat_ema_at_once_at_any_scale_of_speed(scale):
    rounds = driven(150, seed=1, scale=scale)
    assert rms(errors(NARX(background=False), rounds)) < 0.61 * rms(errors(EMA(), rounds))


def test_a_former_run_is_a_warm_start_whose_history_is_not_taken():
    former = NARX(warm_start=None, background=False, rounds_from_scratch=100)
    errors(former, driven(150))
    state = json.loads(json.dumps(former.state_dict()))
    later = NARX(warm_start=state, background=False)
    assert later.rounds == 0
    assert math.isnan(later.predict(0.5, 0.5))
    rounds = driven(99, seed=2, scale=3.0)
    assert rms(errors(later, rounds, 12)) < 0.61 * rms(errors(EMA(), rounds, 12))


def test_without_a_cpu_driver_it_is_ema():
    narx, ema = NARX(background=False), EMA()
    for v, _, m in driven(150):
        narx.update(v, None, m)
        ema.update(v)
        assert narx.predict(None, m) == ema.predict()
        assert narx.predict(0.5, m) == ema.predict()
    assert narx.examples == []


def test_a_memory_that_has_run_out_changes_no_forecast():
    """A reading of 0.001, which no training has seen, made it say five times what was true."""
    ample, low = NARX(background=False), NARX(background=False)
    for k, (v, c, _) in enumerate(driven(150, seed=3)):
        if k > 20:
            assert low.predict(c, 0.001 if k % 3 else 0.6) == ample.predict(c, 0.6)
        ample.update(v, c, 0.6)
        low.update(v, c, 0.001 if k % 2 else 0.6)


def test_parameters_that_are_worse_on_the_newest_fifth_are_not_taken():
    """The relation to the CPU turns round in the newest fifth: what the old rounds taught would be worse than EMA."""
    narx = NARX(warm_start=None, background=False, rounds_from_scratch=100, window=100, retrain_every=500)
    for k, (_, c, m) in enumerate(driven(100)):
        narx.update(500.0 * (c if k < 82 else 0.04 / c), c, m)
    assert not narx.trained


def test_training_in_the_background_is_never_waited_for_and_picked_up_later(monkeypatch):
    """With the trainer held up, hundreds of rounds go on; once let go, its result is adopted."""
    gate, names, waited_for = threading.Event(), [], []
    real = neural_network.fit

    def held(*args, **options):
        names.append(threading.current_thread().name)
        if not gate.wait(20):
            waited_for.append(True)
        return real(*args, **options)

    monkeypatch.setattr(neural_network, "fit", held)
    narx = NARX(warm_start=None, rounds_from_scratch=100, retrain_every=100)
    rounds = driven(600)
    for v, c, m in rounds[:400]:
        narx.predict(c, m)
        narx.update(v, c, m)
    assert not waited_for
    assert not narx.trained
    gate.set()
    deadline = time.monotonic() + 20
    while not narx.trained and time.monotonic() < deadline:
        time.sleep(0.01)
        narx.update(*rounds[-1])
    assert narx.trained
    assert len(names) <= 2  # one at a time: none was queued while one was under way
    assert all(name.startswith("hvd-hetero-training") for name in names)


class Jobs(list):
    """In place of the thread that trains: a list of the trainings handed over, each to be called."""

    def submit(self, train, *args):
        future = Future()
        self.append(lambda: future.set_result(train(*args)))
        return future


@pytest.fixture
def waiting(monkeypatch):
    """A NARX whose first training was handed over and has not come back, and the list of jobs handed over."""
    jobs = Jobs()
    monkeypatch.setattr(training, "pool", lambda pid: jobs)
    narx = NARX(warm_start=None, rounds_from_scratch=40, retrain_every=20)
    for round_ in driven(80):
        narx.update(*round_)
    assert len(jobs) == 1
    return narx, jobs


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_made_during_a_training_trains_by_itself(clone, waiting):
    narx, jobs = waiting
    twin = clone(narx)
    for round_ in driven(25, seed=1):
        twin.update(*round_)
    assert len(jobs) == 2
    jobs[1]()
    twin.update(*driven(1)[0])
    assert twin.trained
    assert not narx.trained


def test_a_child_forked_during_a_training_trains_by_itself(waiting, monkeypatch):
    narx, jobs = waiting
    monkeypatch.setattr(os, "getpid", lambda: -7)
    for round_ in driven(25, seed=1):
        narx.update(*round_)
    assert len(jobs) == 2


def test_a_thread_that_cannot_be_started_is_one_warning_and_tried_again(monkeypatch, caplog):
    class Refuses(Jobs):
        def submit(self, train, *args):
            super().submit(train, *args)
            raise RuntimeError("can't start new thread")

    jobs = Refuses()
    narx = NARX(warm_start=None, rounds_from_scratch=40, retrain_every=20)
    monkeypatch.setattr(training, "pool", lambda pid: jobs)
    for round_ in driven(120):
        narx.update(*round_)
    assert len(jobs) > 1
    jobs[0]()  # stood in the queue and runs after all: nobody waits for it
    narx.update(*driven(1)[0])
    assert not narx.trained
    assert caplog.text.count("could not be started") == 1
    monkeypatch.setattr(training, "pool", lambda pid: jobs)
    jobs = Jobs()
    for round_ in driven(400):  # a training may find nothing better than what is in use; twenty do not
        narx.update(*round_)
        while jobs:
            jobs.pop()()
    assert narx.trained


def test_all_predictors_of_a_process_train_in_one_thread_of_low_priority():
    pool = training.pool(os.getpid())
    threads = {training.result(20) for training in [pool.submit(threading.get_native_id) for _ in range(4)]}
    (thread,) = threads - {threading.get_native_id()}
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, thread) == min(19, mine + training.NICENESS)


def test_a_training_that_fails_is_logged_and_the_next_one_runs(caplog):
    trainer, start = training.Trainer(background=True), neural_network.start(3)

    def bad():
        raise RuntimeError("broken job")

    for train, found in ((bad, None), (lambda: start, start)):
        trainer.begin(train)
        training.pool(os.getpid()).submit(int).result(20)  # it comes after the training
        assert trainer.result() == found
    assert "broken job" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 10}, r"window.* 10"),
        ({"rounds_from_scratch": 1}, "rounds_from_scratch"),
        ({"rounds_when_warm": 1}, "rounds_when_warm"),
        ({"retrain_every": 0}, "retrain_every"),
        ({"warm_start": "elsewhere"}, "warm_start"),
        ({"warm_start": {"predictor": "ema", "version": 1}}, r"warm_start.*narx"),
        ({"warm_start": {"predictor": "narx", "version": 3, "parameters": [1.0]}}, r"parameters.* 13 "),
    ],
)
def test_bad_options_are_errors_that_name_them(options, message):
    with pytest.raises(ValueError, match=message):
        NARX(**options)


def test_a_state_with_rows_of_another_width_is_refused():
    state = NARX().state_dict() | {"rows": [[1.0, 2.0]]}
    with pytest.raises(ValueError, match=r"rows.* 6 "):
        NARX().load_state_dict(state)


def test_a_state_goes_on_in_a_predictor_with_other_options():
    """The options are the object's: a shorter window keeps the newest rounds, and the parameters forecast alike."""
    long, short = NARX(background=False), NARX(background=False, window=60, retrain_every=30)
    rounds = driven(150)
    errors(long, rounds)
    short.load_state_dict(json.loads(json.dumps(long.state_dict())))
    assert short.predict(0.4, 0.5) == long.predict(0.4, 0.5)
    assert short.examples == long.examples[-60:]
    errors(short, driven(80, seed=4))
    assert len(short.examples) == 60
