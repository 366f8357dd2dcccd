"""What the accuracy and the overhead benchmark call good: rules that a bad result cannot pass."""

import math
import sys

import pytest
from script_modules import load


@pytest.fixture(scope="module")
def accuracy():
    return load("accuracy_torch", "benchmarks")


@pytest.fixture(scope="module")
def overhead():
    pytest.importorskip("torch")
    return load("overhead_torch", "benchmarks")


@pytest.fixture(scope="module")
def proof():
    pytest.importorskip("torch")
    return load("gpu.proof", "benchmarks")


@pytest.fixture(scope="module")
def beside():
    pytest.importorskip("torch")
    return load("overhead_beside", "benchmarks", "examples")


def test_a_scaled_loss_is_held_to_the_split_set_by_hand_on_unequal_ranks(beside):
    def told(by_hand, own=0.96):
        rates = {"lb-bsp": [98.0] * 4, "stock": [50.0] * 4, "by hand": [by_hand] * 4, "alone": [70.0] * 4}
        return [{"rates": rates, "by hand": [85, 43], "lb-bsp": [86, 42], "own": [1.02, own]}]

    row, met = beside.unequal_row("DDP", "transformer", told(100.0), 4)
    assert met
    assert row.startswith("| DDP | transformer | 4 | 1.960 | 0.000 | 0.980 | 0.000 | 1.400 | 0.000 | 0.714 | 0.000 |")
    assert row.count("|") == beside.heads("half")[2].count("|")
    assert not beside.unequal_row("DDP", "transformer", told(100.1), 4)[1]
    assert not beside.unequal_row("DDP", "transformer", told(100.0, own=0.94), 4)[1]


@pytest.mark.parametrize(("step_s", "ratio", "met"), [(0.01, 1.02, True), (0.03, 1.02, False), (0.03, 1.009, True)])
def test_a_scaled_loss_may_cost_more_of_a_short_step(beside, step_s, ratio, met):
    told = [{"bsp": [ratio] * 4, "lb-bsp": [1.0] * 4, beside.STOCK_S: [step_s] * 4, "batch": 64}] * 2
    row, good = beside.equal_row("FSDP2", "10", told, 4)
    assert good == met
    assert row.count("|") == beside.heads("equal")[2].count("|")


def test_schemes_take_turns_and_each_begins_a_cycle_as_often(beside):
    order = []

    def scheme(name):
        while True:
            order.append(name)
            yield

    cycles = []
    took = beside.in_turns({name: scheme(name) for name in "ab"}, 4, 3, lambda: None, lambda: cycles.append(len(order)))
    assert {name: len(seconds) for name, seconds in took.items()} == {"a": 4, "b": 4}
    turns = order[::3]
    assert turns == [*"ab", *"ba"] * 3, "the first two cycles do not count"
    assert cycles == [6 * cycle for cycle in range(3, 7)]


def runs(*accuracies, once=True):
    return [{"accuracy": a, "once": once, "rounds": 10} for a in accuracies]


BSP = runs(0.96, 0.97, 0.965)  # a spread of 0.01, a mean of 0.965


def test_a_scheme_that_scatters_widely_gets_no_allowance_for_it(accuracy):
    # 0.03 below BSP on average, which its own spread of 0.09 would cover.
    amiss = accuracy.compare({"bsp": BSP, "unsteady": runs(0.89, 0.935, 0.98)})[1]
    assert len(amiss) == 1
    assert amiss[0].startswith("unsteady differs from BSP by -0.0300")


def test_a_difference_within_the_spread_of_bsp_is_none(accuracy):
    rows, amiss = accuracy.compare({"bsp": BSP, "other": runs(0.957, 0.957, 0.957)})
    assert amiss == []
    assert "0.0100" in rows[-1]


def test_a_difference_that_is_just_the_spread_passes_whatever_way_it_is_rounded(accuracy):
    counts = [((436, 432), (438, 438)), ((430, 431), (431, 432)), ((400, 407), (407, 414))]  # right ones of 450
    for bsp, other in counts:
        assert (
            accuracy.compare({"bsp": runs(*(n / 450 for n in bsp)), "other": runs(*(n / 450 for n in other))})[1] == []
        )


def test_a_sample_that_was_not_visited_is_amiss(accuracy):
    amiss = accuracy.compare({"bsp": BSP, "other": runs(0.96, 0.97, 0.965, once=False)})[1]
    assert amiss == ["other did not visit each sample once"]


def test_the_error_of_a_median_is_that_of_the_normal_law(overhead):
    import numpy as np

    rng = np.random.default_rng(0)
    medians = np.median(rng.normal(1.0, 0.03, (4000, 48)), axis=1)
    errors = [overhead.error_of_median(list(rng.normal(1.0, 0.03, 48)), 48) for _ in range(400)]
    assert np.mean(errors) == pytest.approx(medians.std(), rel=0.05)


def test_every_pair_counts_in_the_overhead(overhead):
    # Half of the pairs from a time when the machine was not steady: the median is of all of them.
    found = of_launches(overhead, [1.0] * 10 + [1.1] * 12, [1.0] * 10 + [1.1] * 12)
    assert found["10 tensors"]["bsp"].error == pytest.approx(0.93 * 0.1 / math.sqrt(22))
    (row,) = (line for line in overhead.table(found, 256) if line.startswith("| 10 tensors"))
    assert row.startswith("| 10 tensors, 256 samples | 2 x 11 | 1.100 | 0.020 |")
    assert row.endswith("| **missed**: 1.1000 (error 0.0198), 1.0000 (error 0.0000) |")


def test_launches_that_differ_by_more_than_their_pairs_make_the_median_unsure(overhead):
    found = of_launches(overhead, [1.0] * 22, [1.02] * 22, [1.04] * 22)
    error = found["10 tensors"]["bsp"].error
    assert error == pytest.approx(max(0.02 / math.sqrt(3), 0.93 * 0.04 / math.sqrt(33)))
    single = of_launches(overhead, [1.0] * 22)
    assert single["10 tensors"]["bsp"].error == math.inf
    assert overhead.verdict(single["10 tensors"]) == "**undecided**"


def of_launches(overhead, *launches: list[float]) -> dict:
    """One network whose BSP has these ratios, and whose LB-BSP is as stock Horovod is."""
    bsp, other = overhead.Ratios(), overhead.Ratios()
    bsp.launches = list(launches)
    other.launches = [[1.0] * len(launch) for launch in launches]
    return {"10 tensors": {"bsp": bsp, "lb-bsp": other}}


@pytest.mark.parametrize(
    ("medians", "said"),
    [
        ([(0.98, 0.004), (1.009, 0.004)], "met"),
        ([(0.98, 0.009), (0.97, 0.006)], "met"),  # unsure, and far from the target all the same
        ([(0.98, 0.004), (1.005, 0.006)], "**undecided**"),
        ([(0.98, 0.009), (1.011, 0.004)], "**missed**"),
        ([(1.005, 0.006), (1.04, 0.009)], "**missed**"),
        ([(0.98, 0.004), (1.015, 0.006)], "**undecided**"),
    ],
)
def test_an_overhead_is_judged_as_far_as_its_error_allows(overhead, medians, said):
    assert overhead.verdict({kind: Given(*of) for kind, of in zip(overhead.KINDS, medians, strict=True)}) == said


class Given:
    """Ratios of this median, and this error of it."""

    def __init__(self, median, error):
        self.all, self.error = [median] * 2, error


BY_NCCL = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("part", "backend", "name", "told"),
    [
        ("tests", "gloo", "gpu/tests", True),
        ("tests", BY_NCCL, "gpu/tests_nccl", True),
        ("stopwatch", BY_NCCL, "gpu/stopwatch", False),
        ("horovod", BY_NCCL, "gpu/horovod", False),
    ],
)
def test_a_proof_on_a_gpu_has_a_table_for_each_backend_that_it_uses(proof, monkeypatch, part, backend, name, told):
    """One rank always talks by the same one, and Horovod by its own: another table of theirs would be a twin."""
    stored = {}
    monkeypatch.setitem(proof.PARTS, part, lambda circumstances: (["a row"], True))
    monkeypatch.setattr(proof, "write_result", stored.__setitem__)
    monkeypatch.setattr(sys, "argv", ["proof.py", part, "--device", "cpu", "--backend", backend, "--write"])
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert proof.main() == 0
    assert list(stored) == [name]
    assert (f"Ranks talk by {backend}." in stored[name]) == told


def test_events_learn_the_curve_that_a_clock_learns(monkeypatch):
    torch = pytest.importorskip("torch")
    curve = load("gpu.curve", "benchmarks")
    now = [0.0]

    class Event:
        """Of a device that is done with what it was given at once."""

        def record(self, stream):
            self.at_s = now[0]

        def query(self):
            return True

        def elapsed_time(self, end):
            return (end.at_s - self.at_s) * 1000.0

    def step(batch):
        now[0] += 1e-3 * max(batch, 8) + 5e-3

    monkeypatch.setattr(curve, "CudaStopwatch", lambda _, made=curve.CudaStopwatch: made(torch.device("cpu"), Event))
    monkeypatch.setattr(curve.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(curve.time, "perf_counter", lambda: now[0])
    by_events, by_clock, _ = curve.on_the_ladder(step, 100)
    assert by_clock.gamma.seconds(50) == pytest.approx(0.055, rel=0.01)
    assert by_events.gamma.seconds(50) == pytest.approx(by_clock.gamma.seconds(50), rel=1e-6)


def test_the_proof_over_horovod_says_so_where_there_is_none(proof, monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(SystemExit, match="Horovod"):
        proof.horovod(proof.Proof("cpu", "gloo", 1, 1))


@pytest.mark.parametrize(("device", "said"), [("cpu", False), ("cuda", True)])
def test_only_on_a_gpu_does_the_table_of_tests_say_how_processes_share_the_device(proof, monkeypatch, device, said):
    monkeypatch.setattr(proof, "TESTS", ())
    monkeypatch.setattr(proof, "control", lambda: None)
    rows, passed = proof.tests(proof.Proof(device, "gloo", 1, 1))
    assert passed
    assert ("Processes take turns on the device." in rows) == said
    assert rows[-1].strip()


def test_the_proof_beside_reducers_wants_the_gain_and_the_own_times(proof):
    rates = {"lb-bsp": [97.0] * 4, "stock": [64.0] * 4, "oracle": [100.0] * 4, "alone": [66.0] * 4}
    told = {"rates": rates, "own_s": [0.104, 0.1], "clock_s": [0.1, 0.1], "oracle": [2, 1], "now": [2, 1]}
    row, met = proof._gain(told)
    assert met
    assert row.endswith("| 1.040, 1.000 | 2:1 | 2:1")
    assert not proof._gain(told | {"own_s": [0.106, 0.1]})[1]
    assert not proof._gain(told | {"rates": rates | {"oracle": [101.0] * 4}})[1]
