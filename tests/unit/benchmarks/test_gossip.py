"""AD-PSGD: who waits for whom, and that its averages train."""

from __future__ import annotations

import numpy as np
import pytest
from script_modules import load

from hvd_hetero.tools.simulation import Cluster, Network
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds

gossip, problems = (load(name, "benchmarks/papers") for name in ("_gossip", "_problems"))
SoftmaxRegression, digits = problems.SoftmaxRegression, problems.digits
GossipModels, GossipSimulation = gossip.GossipModels, gossip.GossipSimulation


def test_where_neighbours_answer_at_once_each_worker_goes_at_its_own_pace():
    """10 and 30 samples per second: 40 together, whatever the slow one does."""
    simulation = GossipSimulation(Cluster.of_speeds([10.0, 30.0]), 10).run(400)
    assert simulation.rate == pytest.approx(40.0, rel=0.01)
    assert simulation.batches == [100, 300]
    assert simulation.waited_s == 0


def test_of_two_workers_that_answer_between_batches_the_fast_one_waits_for_the_slow_one():
    """The fast one's exchange waits for the slow one's end: a batch each per second, as under BSP."""
    simulation = GossipSimulation(Cluster.of_speeds([10.0, 30.0]), 10, answers_at_once=False).run(400)
    assert simulation.rate == pytest.approx(20.0, rel=0.01)
    assert simulation.batches == [200, 200]
    assert simulation.waited_s == pytest.approx(200 * 2 / 3, rel=0.02)


def test_nobody_waits_for_ever_whoever_asks_whom():
    """Five unlike workers, 2,000 batches: all take part, and together they are slower than if nobody waited."""
    cluster = Cluster.of_speeds([10.0, 13.0, 17.0, 23.0, 29.0])
    blocking = GossipSimulation(cluster, 10, answers_at_once=False).run(2000)
    assert min(blocking.batches) > 100
    assert 50.0 < blocking.rate < 92.0


def test_an_exchange_is_paid_for_by_the_worker_that_asks():
    """1 s of computing, 0.5 s for a model there and back."""
    network = Network(latency_s=0.1, message_bytes=2e6, bandwidth=1e7)
    assert GossipSimulation(Cluster.of_speeds([10.0, 10.0], network), 10).run(100).rate == pytest.approx(20 / 1.5)


def test_an_exchange_keeps_the_mean_but_for_the_step():
    problem = SoftmaxRegression(digits(0))
    models = GossipModels(problem, 0.5, workers=3)
    models.models += np.random.default_rng(0).normal(size=models.models.shape)
    gradient = np.random.default_rng(1).normal(size=models.models.shape[1])
    before, third = models.models.mean(axis=0), models.models[1].copy()
    models.average(0, 2)
    models.step(0, gradient)
    np.testing.assert_allclose(models.models.mean(axis=0), before - 0.5 * gradient / 3)
    np.testing.assert_allclose(models.models[0] + 0.5 * gradient, models.models[2])
    assert (models.models[1] == third).all()


def test_the_mean_model_learns_the_digits():
    """Softmax starts at ln 10 = 2.30; four workers of unlike speed, five epochs."""
    problem = SoftmaxRegression(digits(0))
    data = WholeRounds(problem.samples, shuffle=True, seed=0)
    models = GossipModels(problem, 0.5, workers=4)
    simulation = GossipSimulation(Cluster.of_speeds([1.0, 1.0, 1.0, 2.0]), 16, data=data, models=models)
    simulation.run(450, evaluate_every=90)
    losses = [loss for _, _, loss in simulation.loss]
    assert len(losses) == 5
    assert losses[-1] < 0.5 < losses[0]


@pytest.mark.parametrize(
    ("speeds", "batch", "more", "message"),
    [
        ([1.0], 8, {}, r"cluster.* 1\b"),
        ([1.0, 1.0], 0, {}, r"batch.* 0"),
        ([1.0, 1.0], 8, {"data": WholeRounds(8, shuffle=False, seed=0)}, "data and models"),
    ],
)
def test_what_cannot_be_simulated_is_refused(speeds, batch, more, message):
    with pytest.raises(ValueError, match=message):
        GossipSimulation(Cluster.of_speeds(speeds), batch, **more)
