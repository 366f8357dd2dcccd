"""What the accuracy and the overhead benchmark call good: rules that a bad result cannot pass."""

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


def runs(*accuracies, once=True):
    return [{"accuracy": a, "once": once, "rounds": 10} for a in accuracies]


BSP = runs(0.96, 0.97, 0.965)  # a spread of 0.01, a mean of 0.965


def test_a_scheme_that_scatters_widely_gets_no_allowance_for_it(accuracy):
    # 0.03 below BSP on average, which its own spread of 0.09 would cover.
    amiss = accuracy.compare({"bsp": BSP, "unsteady": runs(0.89, 0.935, 0.98)})[1]
    assert len(amiss) == 1
    assert amiss[0].startswith("unsteady differs from BSP by -0.0300")


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
