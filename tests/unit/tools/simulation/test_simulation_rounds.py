"""Rounds in simulated time: the same plans as real balancers, exact times, nothing lost."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace

import numpy as np
import pytest

from hvd_hetero.balancer import Balancer
from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, NonBlocking, SelfAdaptive, StaticAllocation
from hvd_hetero.rounds import MicroBatch
from hvd_hetero.tools.simulation import (
    Availability,
    BestSplit,
    Cluster,
    Compute,
    Drivers,
    Exponential,
    Jitter,
    Network,
    Options,
    RandomSlowDown,
    RoundSimulation,
    Worker,
    simulate,
)
from hvd_hetero.tools.simulation.cluster import DriverMeter, Machines
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds

POLICIES = {
    "bsp": lambda: BSP(max_micro_batch=7),
    "lb-bsp": lambda: LBBSP("memoryless", tolerance=0.0),
    "lb-bsp, mixture": lambda: LBBSP(tolerance=0.0),
    "static": lambda: StaticAllocation([1, 2, 3, 2]),
    "self-adaptive": lambda: SelfAdaptive(20, every=5),
    "elastic-bsp": lambda: ElasticBSP(6),
    "non-blocking": lambda: NonBlocking(5),
    "non-blocking, as in the paper": lambda: NonBlocking(5, anticipates=False),
    "lb-bsp gpu": lambda: LBBSP(device="gpu"),
}


def cluster(noise=0.01):
    """Four unlike workers, none of them steady."""
    return Cluster(
        (
            Worker(Compute.at_speed(100.0, 0.002), variation=(Jitter("round", 0.05),)),
            Worker(Compute.at_speed(200.0), Availability((0.0, 9.0), (1.0, 0.4), 20.0), drivers=Drivers(lag_s=0.5)),
            Worker(Compute(0.003, 0.02, 12, 40), variation=(RandomSlowDown("round", 2.0, 0.3),)),
            Worker(Compute.at_speed(150.0)),
        ),
        Network(latency_s=1e-3, message_bytes=1e5, bandwidth=1e8),
        seed=5,
        measurement_noise=noise,
    )


def varied(variation, faster=1.0):
    """Four steady workers but for this."""
    speeds = (100.0, 200.0, 300.0, 150.0)
    workers = tuple(Worker(Compute.at_speed(faster * v), variation=(variation,)) for v in speeds)
    return Cluster(workers, seed=3, measurement_noise=0.01)


class Channel:
    """The channel of non-blocking rounds, in true time: whoever looks after a rank's end hears of it."""

    def __init__(self):
        self.now_s, self.raised_s = 0.0, float("inf")

    def raise_signal(self, round):
        self.raised_s = min(self.raised_s, self.now_s)

    def raised(self, round):
        return self.now_s >= self.raised_s


class RealBalancers:
    """n balancers, each with its clock, on the same machines, in the order of events."""

    def __init__(self, described, make, global_batch):
        n = len(described.workers)
        self.machines, self.now = Machines(described), np.zeros(n)
        clocks = [lambda i=i: float(self.now[i]) for i in range(n)]
        meters = [DriverMeter(w, i, described.seed, self.now) for i, w in enumerate(described.workers)]
        self.balancers = [Balancer(make(), i, n, global_batch, clock=clocks[i], readings=meters[i]) for i in range(n)]
        self.channel = Channel()
        for balancer in self.balancers:
            balancer.signals = self.channel
        self.time_s, self.rounds = 0.0, 0

    def _ends(self, sizes, begin_s):
        """When each micro-batch of each rank ends, by asking the machines for one after the other."""
        machines = self.machines
        factors = machines.per_round.round(self.rounds)
        each = machines.per_batch.following(np.array([len(of) for of in sizes]))
        ends = []
        for rank, of in enumerate(sizes):
            time_s, found = float(begin_s[rank]), []
            for j, size in enumerate(of):
                work_s = float(machines.devices.seconds(np.full(machines.count, size))[rank])
                work_s *= factors[rank] * each[rank, j]
                time_s = float(machines.availability.finish(time_s, np.full(machines.count, work_s))[rank])
                found.append(time_s)
            ends.append(found)
        return ends

    def _fail(self, plan):
        """Micro-batches that do not fit fail at once, in no time."""
        for i, (balancer, limit) in enumerate(zip(self.balancers, self.machines.devices.memory_limit, strict=True)):
            size = max(plan.sizes(i))
            while size > limit:
                balancer.begin(MicroBatch(plan, size, False))
                size = balancer.out_of_memory()

    def step(self):
        plan, machines, network = self.balancers[0].plan(), self.machines, self.machines.network
        assert len({b.plan() for b in self.balancers}) == 1
        cut = plan.within(np.minimum(machines.devices.memory_limit, 10**6).tolist())
        sizes = [cut.sizes(i) for i in range(machines.count)]
        served = network.kind == "server"
        message_s = network.message_s(machines.bandwidth(self.time_s)) if served else np.zeros(machines.count)
        begin_s = self.time_s + message_s
        ends, errors = self._ends(sizes, begin_s), machines.measurement.round(self.rounds)
        self.now[:], self.channel.raised_s = begin_s, float("inf")
        self._fail(plan)
        for i, balancer in enumerate(self.balancers):
            balancer.begin(MicroBatch(plan, sizes[i][0], len(sizes[i]) == 1), 2 * message_s[i])
        events = [(of[0], i, 0) for i, of in enumerate(ends)]
        heapq.heapify(events)
        vectors, finish_s, done = [], begin_s.copy(), np.zeros(machines.count, dtype=np.int64)
        while events:
            end_s, i, j = heapq.heappop(events)
            balancer, last = self.balancers[i], j == len(sizes[i]) - 1
            self.channel.now_s = end_s
            self.now[i] = begin_s[i] + (end_s - begin_s[i]) * errors[i]  # a rank knows its own clock alone
            if balancer.stop_early() or last:
                vectors.append(balancer.report())
                balancer.waiting()
                finish_s[i], done[i] = end_s, j + 1
            else:
                balancer.pause()
                balancer.begin(MicroBatch(plan, sizes[i][j + 1], j + 2 == len(sizes[i])))
                heapq.heappush(events, (ends[i][j + 1], i, j + 1))
        machines.per_batch.use(done)
        last_s = float((network.served(finish_s + message_s) if served else finish_s).max())
        transfer_s = network.allreduce_s(machines.bandwidth(last_s), self.rounds)
        self.now[:] = self.time_s = last_s + transfer_s
        for balancer in self.balancers:
            balancer.agree(sum(vectors))
        self.rounds += 1
        return plan, self.time_s


KINDS = {
    "ring": cluster(),
    "server": replace(cluster(), network=Network("server", latency_s=0.05, message_bytes=1e5, bandwidth=1e6)),
    "scatter": varied(Exponential("round")),
    "each batch": varied(Jitter("batch", 0.2)),
    "short": varied(Jitter("round", 0.05), faster=60.0),  # rounds so short that ranks learn after they have reported
}


# All policies on one kind of cluster, and one policy of each kind of round on all.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "ring") for name in POLICIES),
        *((name, kind) for name in ("lb-bsp", "self-adaptive", "non-blocking") for kind in KINDS if kind != "ring"),
    ],
)
def test_the_same_plans_and_times_as_real_balancers(name, kind):
    """Thirty rounds on unlike, unsteady machines with measurement noise: round for round the same."""
    real = RealBalancers(KINDS[kind], POLICIES[name], 120)
    simulated = RoundSimulation(KINDS[kind], POLICIES[name](), 120)
    seen = set()
    for _ in range(30):
        plan, time_s = real.step()
        finished = simulated.step()
        assert (finished.plan.samples, finished.plan.micro_batches) == (plan.samples, plan.micro_batches)
        assert simulated.now_s == pytest.approx(time_s, rel=1e-9)
        seen.add(plan)
    stays = name in ("bsp", "static") or name.startswith("non-blocking")
    assert (len(seen) == 1) == stays


@pytest.mark.parametrize("name", POLICIES)
def test_every_sample_once_an_epoch_under_every_policy(name):
    """Three epochs of a length that no batch divides."""

    class Visits:
        loss = 0.0

        def __init__(self):
            self.visited: list[int] = []

        def update(self, plan, samples, done):
            self.visited += np.concatenate(samples).tolist()

    learner = Visits()
    data = WholeRounds(733, shuffle=True, seed=1)
    simulation = RoundSimulation(cluster(), POLICIES[name](), 120, data=data, learner=learner)
    for epoch in range(3):
        while len(learner.visited) < 733 * (epoch + 1):
            simulation.step()
        assert sorted(learner.visited[733 * epoch :]) == list(range(733))


def test_bsp_lasts_as_long_as_the_slowest_and_lb_bsp_as_all_together():
    """Speeds 100, 200, 300: BSP 3 x 100 samples/s; LB-BSP 600."""
    machines = Cluster.of_speeds([100.0, 200.0, 300.0])
    assert simulate(machines, BSP(), 600, 20).rate() == pytest.approx(300.0)
    assert simulate(machines, BSP(), 600, 20).waiting_share() == pytest.approx(1 - 11 / 18)
    balanced = simulate(machines, LBBSP(), 600, 40)
    assert balanced.rate(20) == pytest.approx(600.0, rel=0.02)
    assert balanced.waiting_share(20) == pytest.approx(0.0, abs=0.03)


def test_a_non_blocking_round_ends_with_the_first_and_the_micro_batch_at_hand():
    """Ten micro-batches of a second on the fast, of three on the slow: the slow one does four and ends at 12 s."""
    result = RoundSimulation(Cluster.of_speeds([1.0, 1 / 3]), NonBlocking(10), 20)
    finished = result.step()
    assert finished.table.column("micro_batches").tolist() == [10, 4]
    assert finished.elapsed_s == pytest.approx(12.0)


def test_the_signal_takes_its_time():
    """Heard after 2.5 s more, the slow rank has begun a fifth micro-batch."""
    options = Options(signal_s=2.5)
    finished = RoundSimulation(Cluster.of_speeds([1.0, 1 / 3]), NonBlocking(10), 20, options=options).step()
    assert finished.table.column("micro_batches").tolist() == [10, 5]


def test_exponential_times_follow_theory():
    """Mean round of ten workers: H_10 / rate for BSP, 1 / (10 rate) for non-blocking in tiny micro-batches."""
    workers = tuple(Worker(Compute.at_speed(10_000.0), variation=(Exponential(),)) for _ in range(10))
    machines = Cluster(workers, seed=2)
    blocking = simulate(machines, BSP(), 100_000, 1500)
    assert blocking.round_s() == pytest.approx(sum(1 / k for k in range(1, 11)), rel=0.03)
    nonblocking = simulate(machines, NonBlocking(10_000, anticipates=False), 100_000, 1500)
    assert nonblocking.round_s() == pytest.approx(1 / 10, rel=0.08)


def test_with_a_server_a_slow_link_is_part_of_the_workers_own_time():
    """1 s of computing and 0.5 s each way: the round takes 2 s, and the table tells the transfer as input."""
    workers = (Worker(Compute.at_speed(100.0)), Worker(Compute.at_speed(100.0), bandwidth=100.0))
    machines = Cluster(workers, Network("server", message_bytes=50.0, bandwidth=1e9))
    finished = RoundSimulation(machines, BSP(), 200).step()
    assert finished.elapsed_s == pytest.approx(2.0)
    assert finished.table.column("input_s") == pytest.approx([0.0, 1.0], abs=1e-6)


def brute_force_s(factors, total, now_s):
    """The shortest round of all splits of ``total`` samples over the machines of ``cluster()``."""
    machines, best = Machines(cluster()), np.inf
    for head in itertools.product(range(total + 1), repeat=3):
        if sum(head) <= total:
            shares = np.array([*head, total - sum(head)])
            work_s = machines.devices.pieces(shares, np.minimum(shares, 1)).work_s * factors
            best = min(best, float((machines.availability.finish(now_s, work_s) - now_s).max()))
    return best


@pytest.mark.parametrize("now_s", [0.0, 8.9, 33.0])
def test_the_best_split_against_all_splits(now_s):
    """No split of 14 samples over four workers is sooner."""
    machines = Machines(cluster())
    factors = machines.per_round.round(0)
    plan = BestSplit().foresee(machines, now_s, factors, 14)
    shares = np.array(plan.samples)
    work_s = machines.devices.pieces(shares, np.minimum(shares, 1)).work_s * factors
    taken_s = float((machines.availability.finish(now_s, work_s) - now_s).max())
    assert plan.total == 14
    assert taken_s == pytest.approx(brute_force_s(factors, 14, now_s), rel=1e-6)


@pytest.mark.parametrize("name", ["bsp", "lb-bsp", "self-adaptive", "static"])
def test_no_policy_of_whole_rounds_beats_the_best_split(name):
    """On the same draws, in the mean over the run."""
    best = simulate(cluster(), BestSplit(), 120, 60)
    assert simulate(cluster(), POLICIES[name](), 120, 60).rate() <= best.rate() * (1 + 1e-9)


def test_nobody_takes_what_comes_once_a_round_for_a_part_of_each_micro_batch():
    """Two equal workers, a second of transfers a round and a tenth for each micro-batch: all are done, every round."""
    machines = Cluster.of_speeds((100.0, 100.0), Network("server", latency_s=0.5))
    result = simulate(machines, NonBlocking(4), 80, 20)
    assert result.micro_batches == [8] * 20


def test_a_predictor_given_as_an_object_is_not_shared():
    """Every worker learns on its own, as in a process of its own."""
    from hvd_hetero.prediction import EMA

    simulation = RoundSimulation(Cluster.of_speeds([100.0, 300.0]), LBBSP(EMA()), 400)
    simulation.run(20)
    assert simulation.step().plan.samples == pytest.approx((100, 300), abs=12)


def test_two_runs_with_one_seed_are_one():
    """Also with a predictor that trains."""
    one, two = (simulate(cluster(), LBBSP("narx"), 120, 150).elapsed_s for _ in range(2))
    assert one == two


def test_plans_fixed_ahead_come_a_round_later():
    """With a lead of two, the second and third rounds are as the first; speeds are first known after the second."""
    simulation = RoundSimulation(Cluster.of_speeds([100.0, 300.0]), LBBSP(), 400, options=Options(rounds_ahead=2))
    plans = [simulation.step().plan.samples for _ in range(6)]
    assert plans == [(200, 200)] * 4 + [(150, 250)] * 2
