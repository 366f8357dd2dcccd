"""The search among numbers of micro-batches: where it ends, what it costs, and what it keeps."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import numpy as np
import pytest

from hvd_hetero.policies.trials import Trials

CANDIDATES = (1, 4, 8, 16, 32)


def cost(fixed: float, idle: float) -> Callable[[int], float]:
    """Seconds a sample, of micro-batches with a fixed part and the idle time of one."""
    return lambda number: 1.0 + fixed * number + idle / number


def search(trials: Trials, cost: Callable[[int], float], rounds: int, noise: float = 0.0, seed: int = 0) -> list[int]:
    """The number of each round."""
    rng = np.random.Generator(np.random.PCG64(seed))
    numbers = []
    for factor in rng.lognormal(sigma=noise, size=rounds):
        numbers.append(trials.number)
        trials.learn(cost(trials.number) * factor)
    return numbers


@pytest.mark.parametrize(
    ("fixed", "idle", "best"), [(0.5, 0.5, 1), (0.02, 0.5, 4), (0.004, 0.5, 8), (0.001, 0.5, 16), (0.0, 0.5, 32)]
)
def test_times_without_scatter_lead_to_the_best_number(fixed, idle, best):
    of = cost(fixed, idle)
    assert min(CANDIDATES, key=of) == best
    numbers = search(Trials(CANDIDATES), of, 300)
    assert np.mean(list(map(of, numbers[100:]))) < 1.003 * of(best)
    assert Trials(CANDIDATES).number == 1, "the first is where it begins"


@pytest.mark.parametrize(("fixed", "idle"), [(0.5, 0.2), (0.005, 0.2), (0.004, 1.0), (0.0, 0.3)])
def test_with_a_scatter_of_a_tenth_rounds_take_at_most_two_hundredths_longer_than_with_the_best_number(fixed, idle):
    of = cost(fixed, idle)
    taken = [np.mean(list(map(of, search(Trials(CANDIDATES), of, 1000, 0.1, seed)))) for seed in range(20)]
    best = min(map(of, CANDIDATES))
    assert np.mean(taken) < 1.02 * best
    assert max(taken) < 1.06 * best


def test_what_is_far_worse_is_tried_for_eight_rounds_in_five_hundred():
    numbers = search(Trials(CANDIDATES), cost(0.5, 0.0), 1800, 0.1)
    runs = [(number, len(list(rounds))) for number, rounds in itertools.groupby(numbers)]
    assert runs[1:] == [(4, 8), (1, 506), (4, 8), (1, 506), (4, 8), (1, 506), (4, 8), (1, 242)]


def test_what_is_a_little_worse_is_used_less_the_surer_that_is():
    def share(noise: float) -> float:
        numbers = [search(Trials((1, 4)), lambda number: 1.0 + 0.01 * number, 1000, noise, seed) for seed in range(10)]
        return float(np.mean([each.count(4) for each in numbers])) / 1000

    assert share(0.01) < 0.02 < share(0.1) < 0.25


def test_one_that_takes_much_longer_now_and_then_is_not_left_for_it():
    """As in ranks that wait for one that has to be started again: a hundred times as long, once in a hundred rounds."""
    of = cost(0.004, 1.0)
    taken = []
    for seed in range(10):
        trials, rng = Trials(CANDIDATES), np.random.Generator(np.random.PCG64(seed))
        for _ in range(1000):
            taken.append(of(trials.number))
            trials.learn(of(trials.number) * rng.lognormal(sigma=0.05) * (100.0 if rng.random() < 0.01 else 1.0))
    assert np.mean(taken) < 1.05 * min(map(of, CANDIDATES))


def test_a_better_number_is_found_behind_worse_ones():
    """Micro-batches that cost nothing, on ranks whose whole rounds wait as long as an eighth of one does."""

    def of(number: int) -> float:
        return 1.0 + 0.05 if number == 1 else 1.0 + 0.4 / number

    assert of(4) > of(1) >= of(8) > of(16)
    for seed in range(5):
        numbers = search(Trials(CANDIDATES), of, 300, 0.01, seed)
        assert np.mean([of(number) for number in numbers[150:]]) < of(16)


def test_nothing_is_tried_beyond_what_is_far_worse():
    assert set(search(Trials(CANDIDATES), lambda number: 1.0 + 0.04 * number, 1500, 0.01)) == {1, 4}
    assert set(search(Trials(CANDIDATES), lambda number: 1.0 + 0.015 * number, 1500, 0.001)) == {1, 4, 8}
    assert set(search(Trials(CANDIDATES), lambda number: 1.0 + 0.025 * number, 1500, 0.001)) == {1, 4, 8}


def test_two_rounds_after_each_change_do_not_count():
    calm, disturbed, since = Trials(CANDIDATES), Trials(CANDIDATES), 0
    of = cost(0.004, 0.5)
    for _ in range(200):
        before = calm.number
        assert disturbed.number == before
        calm.learn(of(before))
        disturbed.learn(of(before) * (100.0 if since < 2 else 1.0))
        since = since + 1 if calm.number == before else 0


@pytest.mark.parametrize("seed", range(3))
def test_costs_that_change_are_noticed(seed):
    trials = Trials(CANDIDATES)
    for fixed in (0.0, 0.02, 0.0):
        of = cost(fixed, 0.5)
        taken = [of(number) for number in search(trials, of, 1000, 0.03, seed)]
        assert np.mean(taken[-300:]) < 1.03 * min(map(of, CANDIDATES))


def test_a_search_that_is_restored_goes_on_as_before():
    of = cost(0.004, 0.5)
    for stop in (0, 3, 8, 20, 100):
        first, second = Trials(CANDIDATES), Trials(CANDIDATES)
        search(first, of, stop, 0.1)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert search(first, of, 200, 0.1, 1) == search(second, of, 200, 0.1, 1)


@pytest.mark.parametrize("times", [10.0, 1e3, 1e5])
def test_a_strange_first_round_does_not_make_a_far_worse_number_look_good(times):
    """The first round with 1 that counts takes so many times as long."""
    trials = Trials((1, 4))
    numbers = []
    for number, factor in enumerate(np.random.default_rng(0).lognormal(sigma=0.02, size=1500)):
        numbers.append(trials.number)
        trials.learn((1.0 if trials.number == 1 else 10.0) * factor * (times if number == 2 else 1.0))
    assert numbers.count(4) < 0.05 * 1500


@pytest.mark.parametrize(
    "changed",
    [
        {"at": 5},
        {"at": -1},
        {"least": 1},
        {"rounds": []},
        {"rounds": [1.0] * 4},
        {"seconds": [-1.0] * 5},
        {"since": -1},
    ],
    ids=str,
)
def test_a_state_of_another_search_is_refused(changed):
    trials = Trials(CANDIDATES)
    with pytest.raises(ValueError, match=r"state.*resume"):
        trials.load_state_dict(trials.state_dict() | changed)
    assert trials.number == 1


def test_candidates_whose_rounds_are_the_same_need_no_trial():
    trials = Trials(CANDIDATES)
    trials.same_as(10)
    assert trials.number == 8
    trials.same_as(8)
    assert trials.number == 8
    numbers = search(trials, cost(0.5, 0.0), 1500)  # the fewer the better, but fewer make the same rounds
    assert set(numbers) == {8, 16}


def test_a_single_candidate_is_kept():
    assert set(search(Trials((8,)), cost(0.5, 0.0), 50)) == {8}
