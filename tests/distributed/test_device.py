"""Devices that saturate and run out of memory, played by CPU ranks: the split that is found, and nothing ever lost."""

from __future__ import annotations

import pytest

from hvd_hetero.allocation import Gamma, minimax

pytestmark = pytest.mark.distributed
SHORTAGES = [
    "forward",
    "backward",
    "after backward",
    "twice in a row",
    "three sizes",
    "later micro-batch, forward",
    "later micro-batch, backward",
    "last micro-batch, forward",
    "last micro-batch, backward",
    "every micro-batch above five",
    "left for good",
    "static",
    "non-blocking",
    "non-blocking, after the signal to stop",
    "elastic-bsp",
]


@pytest.fixture(scope="module")
def outcome(pool):
    """What rank 0 answers."""
    with pool("device.py", 3, "torch") as ranks:
        yield ranks[0]


@pytest.mark.parametrize("name", SHORTAGES)
def test_whenever_memory_runs_short_parameters_are_those_of_the_single_process(outcome, name):
    assert outcome[name]["difference"] <= 1e-10
    assert outcome[name]["between_ranks"] == 0.0


@pytest.mark.parametrize("name", SHORTAGES)
def test_memory_did_run_short_in_every_case(outcome, name):
    case = outcome[name]
    assert case["struck"]
    assert case["warned"] == len(case["struck"])
    # How many micro-batches a rank does is a matter of time under the last two.
    if name not in ("every micro-batch above five", "non-blocking", "elastic-bsp"):
        assert case["still to strike"] == 0
    if name == "twice in a row":
        assert case["struck"][1] == 2, "right afterwards a small part is tried"


@pytest.mark.parametrize("name", SHORTAGES)
def test_a_round_whose_only_micro_batch_failed_is_not_complete(outcome, name):
    assert outcome[name]["complete when struck"] == [False]


@pytest.mark.parametrize("name", SHORTAGES)
def test_no_sample_is_lost_or_done_twice(outcome, name):
    case = outcome[name]
    last = case["epochs"][-1]
    for epoch in range(last + 1):
        visited = sorted(i for r, of in zip(case["rounds"], case["epochs"], strict=True) if of == epoch for i in r)
        assert len(set(visited)) == len(visited)
        if epoch < last and name != "left for good":  # the last one was left in the middle
            assert visited == list(range(case["samples"]))
    assert last >= 1 or name.startswith("non-blocking"), "whose rounds are as long as the others allow"


def test_the_limit_with_its_headroom_reaches_all_ranks_with_the_very_round_and_stays(outcome):
    case = outcome["backward"]
    size = case["struck"][0]
    assert [limit[0] for limit in case["limits"]] == [0] * 3 + [int(0.9 * size)] * (len(case["limits"]) - 3)
    assert all(not any(limit[1:]) for limit in case["limits"])
    assert outcome["every micro-batch above five"]["limits"][-1][0] == 5


def test_what_cannot_be_done_again_says_when_and_what_to_do_and_other_errors_pass(outcome):
    own, update, cleared, other = outcome["fatal"]
    assert own.startswith("HeteroError: round 0: rank 0 ran out of memory with a batch of your own")
    assert "in step() or after it, which is not done again" in update
    assert "set max_micro_batch of the policy below 8" in update
    assert "zero_grad" in cleared
    assert other == "RuntimeError: shapes cannot be multiplied"


def test_a_loop_that_nothing_would_save_is_told_once_before_and_when_it_has_happened(outcome):
    before, after = outcome["unprotected"]
    assert before.startswith("policy 'lb-bsp' tries larger batches than you have tried")
    assert after.startswith("round 4: rank 0 has run out of memory with")
    for message in (before, after):
        assert "with balance.surviving_out_of_memory()" in message
        assert "docs/gpu.md" in message


def test_lb_bsp_finds_the_split_of_unequal_devices_within_what_fits(outcome):
    curves = outcome["curves"]
    devices = [Gamma(m, b, saturation, None) for m, b, saturation in curves["gammas"]]
    total = curves["plans"][0][0]
    limit = curves["limit"]
    assert 0.85 * 40 <= limit <= 40, "40 samples fit there"

    def makespan_s(shares: list[int]) -> float:
        counts = [-(-shares[0] // limit), *[1] * (len(shares) - 1)]
        return max(k * d.seconds(x / k) for d, x, k in zip(devices, shares, counts, strict=True))

    best = min(
        makespan_s([x, *minimax(*_columns(devices[1:]), 0.0, total - x, 1, total).shares.tolist()])
        for x in range(1, total - len(devices) + 2)
    )
    # On simulated clocks, which know no noise. Plans leave the optimum until the whole ladder has been measured.
    makespans_s = [makespan_s(shares) for _, shares in curves["plans"]]
    assert makespans_s[0] > 1.4 * best
    assert max(makespans_s[-10:]) <= 1.05 * best
    assert max(makespans_s[30:]) <= 1.3 * best


def test_the_record_holds_curves_limit_and_headroom(outcome):
    recorded, curves = outcome["curves"]["telemetry"], outcome["curves"]
    assert recorded["limit"] == [curves["limit"], *[0] * (len(recorded["limit"]) - 1)]
    assert recorded["headroom"] == pytest.approx(0.1)
    for rank, (slope_s, intercept_s, saturation) in enumerate(curves["gammas"]):
        found = Gamma(recorded["slope_s"][rank], recorded["intercept_s"][rank], recorded["saturation"][rank], None)
        true = Gamma(slope_s, intercept_s, saturation, None)
        for batch in (16, 32):
            assert found.seconds(batch) == pytest.approx(true.seconds(batch), rel=0.05)


def test_each_sample_of_an_epoch_is_visited_once_on_the_ladder_too(outcome):
    epochs, total = outcome["curves"]["epochs"], outcome["curves"]["plans"][0][0]
    assert epochs == [list(range(15 * total))] * 3


def _columns(devices: list[Gamma]) -> tuple[list[float], list[float]]:
    return [d.slope_s for d in devices], [d.intercept_s for d in devices]
