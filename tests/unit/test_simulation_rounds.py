"""Rounds in simulated time: the same plans as real balancers, exact times, nothing lost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hvd_hetero.balancer import Balancer, MicroBatch
from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, NonBlocking, SelfAdaptive, StaticAllocation
from hvd_hetero.simulation import (
    Availability,
    BestSplit,
    Cluster,
    Compute,
    Drivers,
    Exponential,
    Jitter,
    Network,
    Options,
    RoundSimulation,
    SlowDown,
    Worker,
    simulate,
)
from hvd_hetero.simulation.cluster import Machines, Meter
from hvd_hetero.simulation.order import WholeRounds
from hvd_hetero.simulation.profiled import ProfiledLBBSP
from hvd_hetero.theory import round_time_nonblocking, round_time_synchronous

POLICIES = {
    "bsp": lambda: BSP(max_micro_batch=7),
    "lb-bsp": lambda: LBBSP("memoryless", tolerance=0.0),
    "static": lambda: StaticAllocation([1, 2, 3, 2]),
    "self-adaptive": lambda: SelfAdaptive(20, every=5),
    "elastic-bsp": lambda: ElasticBSP(6),
    "non-blocking": lambda: NonBlocking(5),
    "non-blocking, as in the paper": lambda: NonBlocking(5, anticipates=False),
    "lb-bsp gpu": lambda: LBBSP(device="gpu"),
}


def cluster(noise: float = 0.01) -> Cluster:
    """Four unlike workers, none of them steady."""
    return Cluster(
        (
            Worker(Compute.at_speed(100.0, 0.002), variation=(Jitter("round", 0.05),)),
            Worker(Compute.at_speed(200.0), Availability((0.0, 9.0), (1.0, 0.4), 20.0), drivers=Drivers(lag_s=0.5)),
            Worker(Compute(0.003, 0.02, 12, 40), variation=(SlowDown("round", 2.0, 0.3),)),
            Worker(Compute.at_speed(150.0)),
        ),
        Network(latency_s=1e-3, message_bytes=1e5, bandwidth=1e8),
        seed=5,
        measurement_noise=noise,
    )


class Signal:
    """The channel of non-blocking rounds: whoever looks at this time or later sees the first rank's end."""

    def __init__(self, clock) -> None:
        self.clock, self.at_s = clock, float("inf")

    def raise_signal(self, round: int) -> None:
        return

    def raised(self, round: int) -> bool:
        return bool(self.clock() >= self.at_s)


class RealBalancers:
    """n balancers, each with its clock, on the same machines."""

    def __init__(self, described: Cluster, make, global_batch: int) -> None:
        n = len(described.workers)
        self.machines, self.now = Machines(described), np.zeros(n)
        clocks = [lambda i=i: float(self.now[i]) for i in range(n)]
        meters = [Meter(w, i, described.seed, self.now) for i, w in enumerate(described.workers)]
        self.balancers = [Balancer(make(), i, n, global_batch, clock=clocks[i], meter=meters[i]) for i in range(n)]
        self.signals = [Signal(clock) for clock in clocks]
        for balancer, signal in zip(self.balancers, self.signals, strict=True):
            balancer.signals = signal
        self.time_s, self.rounds = 0.0, 0

    def _ends(self, plan, rank: int) -> list[float]:
        """When each micro-batch of a rank ends, by asking the machines for one after the other."""
        machines, time_s, ends = self.machines, self.time_s, []
        factor = float(machines.per_round.round(self.rounds)[rank])
        for size in plan.sizes(rank):
            work_s = float(machines.devices.seconds(np.full(machines.count, size))[rank])
            time_s = machines.availability.finish_one(rank, time_s, work_s * factor)
            ends.append(time_s)
        return ends

    def _expects(self, balancer: Balancer, ends: list[float]) -> bool:
        """Whether this rank stops by itself, so that nobody hears of its end."""
        end = balancer._end
        return end is not None and any(end.ends_before(e - self.time_s, j + 1) for j, e in enumerate(ends[:-1]))

    def step(self) -> tuple:
        plan = self.balancers[0].plan()
        assert len({b.plan() for b in self.balancers}) == 1
        limits = self.machines.devices.memory_limit
        ends = [self._ends(plan.within(np.minimum(limits, 10**6).tolist()), i) for i in range(len(self.balancers))]
        whole = [e for b, e in zip(self.balancers, ends, strict=True) if not self._expects(b, e)]
        first_s = min((e[-1] for e in whole), default=float("inf"))
        errors, vectors, last_s = self.machines.measurement.round(self.rounds), [], 0.0
        for i, balancer in enumerate(self.balancers):
            cut = plan.within(np.minimum(limits, 10**6).tolist())
            size = max(plan.sizes(i))
            while size > limits[i]:  # fails at once, in no time
                self.now[i] = self.time_s
                balancer.begin(MicroBatch(plan, size, False))
                size = balancer.out_of_memory()
            sizes = cut.sizes(i)
            self.signals[i].at_s = first_s
            for j, (size, end_s) in enumerate(zip(sizes, ends[i], strict=True)):
                self.now[i] = self.time_s if j == 0 else self.now[i]
                balancer.begin(MicroBatch(plan, size, j == len(sizes) - 1))
                self.now[i] = end_s
                stop = balancer.stop_early()
                if stop or j == len(sizes) - 1:
                    last_s = max(last_s, end_s)
                    self.now[i] = self.time_s + (end_s - self.time_s) * errors[i] if j == 0 else end_s
                    if j > 0:  # an error of the whole, put into the last of the micro-batches
                        self.now[i] += (end_s - self.time_s) * (errors[i] - 1)
                    break
                balancer.pause()
            vectors.append(balancer.report())
        transfer_s = self.machines.network.allreduce_s(self.machines.bandwidth(last_s), self.rounds)
        self.now[:] = self.time_s = last_s + transfer_s
        for balancer in self.balancers:
            balancer.agree(sum(vectors))
        self.rounds += 1
        return plan, self.time_s


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_plans_and_times_as_real_balancers(name):
    """Forty rounds on unlike, unsteady machines with measurement noise: round for round the same."""
    real = RealBalancers(cluster(), POLICIES[name], 120)
    simulated = RoundSimulation(cluster(), POLICIES[name](), 120)
    seen = set()
    for _ in range(40):
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

        def __init__(self) -> None:
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
    balanced = simulate(machines, LBBSP(), 600, 20)
    assert balanced.rate(3) == pytest.approx(600.0)
    assert balanced.waiting_share(3) == pytest.approx(0.0, abs=1e-9)


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
    """Mean round of ten workers: H_P / rate for BSP, 1 / (rate P) for non-blocking in tiny micro-batches."""
    workers = tuple(Worker(Compute.at_speed(10_000.0), variation=(Exponential(),)) for _ in range(10))
    machines = Cluster(workers, seed=2)
    blocking = simulate(machines, BSP(), 100_000, 1500)
    assert blocking.round_s() == pytest.approx(round_time_synchronous(10), rel=0.03)
    nonblocking = simulate(machines, NonBlocking(10_000, anticipates=False), 100_000, 1500)
    assert nonblocking.round_s() == pytest.approx(round_time_nonblocking(10), rel=0.08)


def test_draws_per_batch_change_nothing_in_the_mean_but_their_sum():
    """Sixteen independent micro-batches scatter less than one draw for all of them, around the same mean."""

    def run(per: str):
        worker = Worker(Compute.at_speed(100.0), variation=(Jitter(per, 0.3),))
        return np.array(simulate(Cluster((worker,), seed=4), BSP(max_micro_batch=10), 160, 600).elapsed_s)

    once, each = run("round"), run("batch")
    assert each.mean() == pytest.approx(once.mean(), rel=0.03)
    assert each.std() == pytest.approx(once.std() / 4, rel=0.15)


def test_with_a_server_a_slow_link_is_part_of_the_workers_own_time():
    """1 s of computing and 0.5 s each way: the round takes 2 s, and the table tells the transfer as input."""
    workers = (Worker(Compute.at_speed(100.0)), Worker(Compute.at_speed(100.0), bandwidth=100.0))
    machines = Cluster(workers, Network("server", message_bytes=50.0, bandwidth=1e9))
    finished = RoundSimulation(machines, BSP(), 200).step()
    assert finished.elapsed_s == pytest.approx(2.0)
    assert finished.table.column("input_s") == pytest.approx([0.0, 1.0], abs=1e-6)


def brute_force_s(factors, total: int, now_s: float) -> float:
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
def test_no_scheme_of_whole_rounds_beats_the_best_split(name):
    """On the same draws, in the mean over the run."""
    best = simulate(cluster(), BestSplit(), 120, 60)
    assert simulate(cluster(), POLICIES[name](), 120, 60).rate() <= best.rate() * (1 + 1e-9)


def test_the_best_split_knows_draws_per_batch_too():
    """Where shares are one micro-batch each, all end together, to half a sample, whatever the draws."""
    workers = tuple(Worker(Compute.at_speed(v), variation=(Jitter("batch", 0.3),)) for v in (1000.0, 2000.0))
    simulation = RoundSimulation(Cluster(workers, seed=3), BestSplit(), 6000)
    for _ in range(20):
        busy_s = simulation.step().table.busy_s
        assert busy_s.max() / busy_s.min() < 1.002


def test_a_predictor_given_as_an_object_is_not_shared():
    """Every worker learns on its own, as in a process of its own."""
    from hvd_hetero.prediction import EMA

    simulation = RoundSimulation(Cluster.of_speeds([100.0, 300.0]), LBBSP(EMA()), 400)
    simulation.run(8)
    assert simulation.step().plan.samples == (100, 300)


def test_two_runs_with_one_seed_are_one():
    """Also with a predictor that trains."""
    one, two = (simulate(cluster(), LBBSP("narx"), 120, 150).elapsed_s for _ in range(2))
    assert one == two


def test_plans_fixed_ahead_come_a_round_later():
    """With a lead of two, the second and third rounds are as the first; speeds are first known after the second."""
    simulation = RoundSimulation(Cluster.of_speeds([100.0, 300.0]), LBBSP(), 400, options=Options(lead=2))
    plans = [simulation.step().plan.samples for _ in range(6)]
    assert plans == [(200, 200)] * 4 + [(100, 300)] * 2


def test_the_papers_scheme_with_a_server_makes_room_for_a_slow_link():
    """Three equal devices, one link that costs the time of 60 samples each way: it gets 120 samples fewer."""
    profile = Compute(0.01, 0.1, 10, 400)
    workers = (Worker(profile), Worker(profile), Worker(profile, bandwidth=1.0 / 0.6))
    machines = Cluster(workers, Network("server", message_bytes=1.0, bandwidth=1e9))
    simulation = RoundSimulation(machines, ProfiledLBBSP([profile] * 3), 600)
    simulation.run(3)
    assert simulation.step().plan.samples == (240, 240, 120)
    with pytest.raises(ValueError, match="one curve per worker, got 2 for 3"):
        RoundSimulation(machines, ProfiledLBBSP([profile] * 2), 600)
