"""What is trained in simulated time: problems, update rules, and the schemes that need a server."""

import numpy as np
import pytest
from script_modules import load

from hvd_hetero.policies import BSP, LBBSP, NonBlocking, SelfAdaptive
from hvd_hetero.rounds import RoundPlan
from hvd_hetero.tools.simulation import (
    Cluster,
    Options,
    RoundSimulation,
)
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds
from hvd_hetero.topology import complete, matcha
from hvd_hetero.topology.mixing import MatchaMixing, NeighbourMixing

_learners, _problems, _server = (load(name, "benchmarks/papers") for name in ("_learners", "_problems", "_server"))
AllreduceLearner, LocalLearner = _learners.AllreduceLearner, _learners.LocalLearner
NeighboursLearner, learner_for = _learners.NeighboursLearner, _learners.learner_for
SmallNetwork, SoftmaxRegression, digits = _problems.SmallNetwork, _problems.SoftmaxRegression, _problems.digits
Scheme, ServerModel, ServerSimulation = _server.Scheme, _server.ServerModel, _server.ServerSimulation


@pytest.fixture(scope="module")
def data():
    return digits()


@pytest.mark.parametrize("problem", [SoftmaxRegression, SmallNetwork])
def test_gradients_are_the_slopes_of_the_loss(problem, data):
    """Central differences along ten directions, over all training samples."""
    made = problem(data)
    rng = np.random.default_rng(0)
    at = made.start(1) + 0.1 * rng.normal(size=made.start(1).shape)
    gradient = made.gradient(at, np.arange(made.samples))
    for _ in range(10):
        step = 1e-6 * rng.normal(size=at.shape)
        assert (made.loss(at + step) - made.loss(at - step)) / 2 == pytest.approx(gradient @ step, rel=1e-4)


def train(policy, problem, rounds=40, **how):
    machines = Cluster.of_speeds([100.0, 200.0, 400.0])
    learner = learner_for(policy, problem, 0.5, **how)
    RoundSimulation(machines, policy, 84, data=WholeRounds(problem.samples, shuffle=True, seed=3), learner=learner).run(
        rounds
    )
    return learner


@pytest.mark.parametrize("policy", [LBBSP(), SelfAdaptive(12, every=4)], ids=["lb-bsp", "self-adaptive"])
def test_the_split_does_not_change_the_training(policy, data):
    """To rounding, the parameters of BSP after the same rounds."""
    problem = SmallNetwork(data)
    assert train(policy, problem).parameters == pytest.approx(train(BSP(), problem).parameters, abs=1e-9)


def test_one_process_on_the_same_batches_gets_the_same(data):
    """BSP on three workers is plain SGD on the shared permutation."""
    problem = SoftmaxRegression(data)
    order, at = WholeRounds(problem.samples, shuffle=True, seed=3), problem.start(0)
    for _ in range(40):
        _, (batch,) = order.take_round(RoundPlan.of([84]))
        order.finish([len(batch)])
        at = at - 0.5 * problem.gradient(at, batch)
    assert train(BSP(), problem).parameters == pytest.approx(at, abs=1e-12)


UNEQUAL = Cluster.of_speeds([100.0, 200.0, 400.0])


def test_asp_is_as_fast_as_all_workers_together():
    """700 samples a second, and nobody waits."""
    result = ServerSimulation(UNEQUAL, Scheme("asp"), 20).run(3500)
    assert result.rate(100) == pytest.approx(700.0, rel=0.01)
    assert result.waiting_share() == 0.0


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_ssp_keeps_its_bound_and_is_as_slow_as_the_slowest(bound):
    """No clock ever more than bound + 1 ahead (it has pushed what it began in time), and 3 x 100 samples/s."""
    simulation = ServerSimulation(UNEQUAL, Scheme("ssp", bound), 20)
    furthest = 0

    def look():
        nonlocal furthest
        furthest = max(furthest, max(simulation._clocks) - min(simulation._clocks))

    result = simulation.run(3000, look)
    assert furthest == bound + 1
    assert result.rate(300) == pytest.approx(300.0, rel=0.02)
    # Idle: 1/2 of the middle worker's time and 3/4 of the fastest's.
    assert result.waiting_share(300) == pytest.approx((0.5 + 0.75) / 3, abs=0.02)


def test_stale_gradients_are_those_of_the_parameters_that_were_pulled(data):
    """Two workers, one three times as fast: replayed by hand from the order of pulls and pushes."""
    problem = SoftmaxRegression(data)
    model = ServerModel(problem, 0.1)
    order = WholeRounds(problem.samples, shuffle=True, seed=1)
    ServerSimulation(Cluster.of_speeds([10.0, 31.0]), Scheme("asp"), 10, data=order, model=model).run(5)
    # Pulls: both at 0, then the fast one after each push; pushes: fast, fast, fast, slow (at 1 s), fast.
    again = WholeRounds(problem.samples, shuffle=True, seed=1)
    batches = []
    for _ in range(6):
        batches.append(again.take_round(RoundPlan.of([10]))[1][0])
        again.finish([10])
    start = at = problem.start(0)
    at = at - 0.1 * problem.gradient(at, batches[1])
    at = at - 0.1 * problem.gradient(at, batches[2])
    at = at - 0.1 * problem.gradient(at, batches[3])
    fast = at
    at = at - 0.1 * problem.gradient(start, batches[0])
    at = at - 0.1 * problem.gradient(fast, batches[4])
    assert model.parameters == pytest.approx(at, abs=1e-12)


@pytest.mark.parametrize("mixing", [NeighbourMixing(complete(3)), MatchaMixing(matcha(complete(3), 0.5), seed=4)])
def test_the_models_are_those_of_the_rule_by_hand(mixing):
    """Six rounds of unequal shares: x_i <- sum_j W_ij x_j - eta (n S_i / S) G_i, with the rows that a rank uses."""
    problem = SoftmaxRegression(digits())
    policy = NonBlocking(4)
    learner = learner_for(policy, problem, 0.5, mixing=mixing)
    assert isinstance(learner, NeighboursLearner)
    order = WholeRounds(problem.samples, shuffle=True, seed=2)
    again = WholeRounds(problem.samples, shuffle=True, seed=2)
    machines = Cluster.of_speeds([100.0, 200.0, 400.0])
    simulation = RoundSimulation(machines, policy, 96, options=Options(sync=mixing), data=order, learner=learner)
    models = [problem.start(0)] * 3
    for number in range(6):
        finished = simulation.step()
        used = [int(s) for s in finished.table.figures("samples")]
        assert len(set(used)) > 1
        _, samples = again.take_round(finished.plan)
        again.finish(used)
        steps = [problem.gradient(m, s[:u]) * 3 * u / sum(used) for m, s, u in zip(models, samples, used, strict=True)]
        rows = [mixing.row(i, number) for i in range(3)]
        models = [
            sum(w * models[j] for j, w in row.items()) - 0.5 * step for row, step in zip(rows, steps, strict=True)
        ]
    assert learner.parameters == pytest.approx(np.mean(models, axis=0), abs=1e-12)
