"""Every sample once, whatever the plans do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.rounds import RoundPlan
from hvd_hetero.sampling import SharedPermutation


def epoch(order: SharedPermutation, plan_of_round, workers: int) -> list[list[np.ndarray]]:
    """What each rank gets in each round, from one copy of the order per rank, as in a real job."""
    copies = [SharedPermutation(order.length, shuffle=order.shuffle, seed=order.seed) for _ in range(workers)]
    for copy in copies:
        copy.start(order.epoch)
    rounds = []
    while copies[0].remaining:
        plan = plan_of_round(len(rounds))
        rounds.append([copy.take(plan, rank)[1] for rank, copy in enumerate(copies)])
    assert all(copy.remaining == 0 for copy in copies)
    return rounds


@given(st.integers(1, 120), st.integers(1, 4), st.integers(0, 3), st.data())
@settings(derandomize=True, max_examples=100)
def test_each_sample_of_an_epoch_is_visited_exactly_once_under_changing_plans(length, workers, number, data):
    total = data.draw(st.integers(workers, 30))
    seeds = data.draw(st.integers(0, 99))

    def plan_of_round(r: int) -> RoundPlan:
        cuts = np.sort(np.random.default_rng([seeds, r]).integers(0, total + 1, workers - 1))
        return RoundPlan.of(np.diff(cuts, prepend=0, append=total))

    order = SharedPermutation(length, shuffle=True, seed=seeds)
    order.start(number)
    rounds = epoch(order, plan_of_round, workers)
    seen = np.concatenate([part for parts in rounds for part in parts])
    assert sorted(seen) == list(range(length))
    assert len(rounds) == -(-length // total)


def test_the_samples_of_a_round_do_not_depend_on_the_split():
    order = SharedPermutation(100, shuffle=True, seed=3)
    equal = epoch(order, lambda r: RoundPlan.of([8, 8]), 2)
    skewed = epoch(order, lambda r: RoundPlan.of([r % 16, 16 - r % 16]), 2)
    for a, b in zip(equal, skewed, strict=True):
        assert np.concatenate(a).tolist() == np.concatenate(b).tolist()


def test_epochs_and_seeds_have_orders_of_their_own_and_the_same_ones_every_time():
    def order(seed: int, number: int) -> tuple[int, ...]:
        it = SharedPermutation(50, shuffle=True, seed=seed)
        it.start(number)
        return tuple(it.take(RoundPlan.of([50]), 0)[1].tolist())

    orders = {order(seed, number) for seed in range(3) for number in range(3)}
    assert len(orders) == 9
    assert order(1, 1) in orders


def test_without_shuffling_the_order_is_that_of_the_dataset():
    assert SharedPermutation(5).take(RoundPlan.of([5]), 0)[1].tolist() == [0, 1, 2, 3, 4]


def test_the_checksum_tells_orders_apart():
    checksums = {SharedPermutation(50, shuffle=True, seed=s).checksum for s in range(20)} | {
        SharedPermutation(50).checksum
    }
    assert len(checksums) == 21


def test_the_place_changes_with_every_round_and_epoch():
    places = set()
    order = SharedPermutation(6)
    for number in range(3):
        order.start(number)
        while order.remaining:
            places.add(order.place)
            order.take(RoundPlan.of([2]), 0)
    assert len(places) == 9


@pytest.mark.parametrize(
    ("arguments", "message"), [({"length": 0}, "at least one sample"), ({"length": 5, "seed": -1}, "seed must not be")]
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        SharedPermutation(**arguments)


def test_taking_beyond_the_end_is_an_error():
    order = SharedPermutation(4)
    order.take(RoundPlan.of([4]), 0)
    with pytest.raises(ValueError, match="no samples left"):
        order.take(RoundPlan.of([4]), 0)
