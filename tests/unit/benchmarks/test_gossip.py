"""AD-PSGD: who waits for whom, and that its averages train."""

import pytest
from script_modules import load

from hvd_hetero.tools.simulation import Cluster

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
