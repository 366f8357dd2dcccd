"""Every sample once, whatever the plans do."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.rounds import RoundPlan


def epoch(order: SharedPermutation, plan_of_round, workers: int) -> list[list[np.ndarray]]:
    """What each rank gets in each round, from one copy of the order per rank, as in a real job."""
    copies = [SharedPermutation(order.length, shuffle=order.shuffle, seed=order.seed) for _ in range(workers)]
    for copy in copies:
        copy.start(order.epoch)
    rounds = []
    while copies[0].remaining:
        plan = plan_of_round(len(rounds))
        rounds.append([copy.take(plan, rank).part for rank, copy in enumerate(copies)])
    assert all(copy.remaining == 0 for copy in copies)
    return rounds


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
        return tuple(it.take(RoundPlan.of([50]), 0).part.tolist())

    orders = {order(seed, number) for seed in range(3) for number in range(3)}
    assert len(orders) == 9
    assert order(1, 1) in orders


def test_the_checksum_tells_orders_apart():
    checksums = {SharedPermutation(50, shuffle=True, seed=s).checksum for s in range(20)} | {
        SharedPermutation(50).checksum
    }
    assert len(checksums) == 21


def test_the_fingerprint_changes_with_every_round_and_epoch():
    seen = set()
    order = SharedPermutation(6)
    for number in range(3):
        order.start(number)
        while order.remaining:
            seen.add(order.take(RoundPlan.of([2]), 0).fingerprint)
    assert len(seen) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, r"dataset.* 0\b"),
        ({"length": 5, "seed": -1}, r"seed.* -1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        SharedPermutation(**arguments)


def _rounds(order: SharedPermutation, rounds_ahead: int, begin: int, count: int, least: int = 1) -> list[list[int]]:
    """What the rounds that follow do: rounds taken ahead, the slowest rank leaving some of its samples undone.

    No round has fewer than ``least`` samples, as without the last of an epoch if that is short.
    """
    plan, flight, done = RoundPlan((5, 4), (5, 4), ends="first"), [], []
    while len(done) < count:
        while len(flight) <= rounds_ahead and order.remaining >= least:
            short = order.take(plan, 0).plan
            flight.append((short, order._open[-1].indices.tolist()))
        if flight:
            short, indices = flight.pop(0)
            left = min((begin + len(done)) % 4, short.samples[1]) if short.ends == "first" else 0
            order.finish([short.samples[0], short.samples[1] - left])
            done.append(indices[: len(indices) - left])
        elif not order.holds(least):
            break
    return done


@pytest.mark.parametrize("length", [40, 37])
@pytest.mark.parametrize("least", [1, 9])
@pytest.mark.parametrize("rounds_ahead", [0, 1, 3])
def test_an_interrupted_order_goes_on_as_if_it_had_not_been(rounds_ahead, least, length):
    """Interrupted after every round, with rounds in flight and abandoned samples that wait to come back."""
    passes_ended = 0
    for interrupted in range(12):
        orders = [SharedPermutation(length, shuffle=True, seed=3) for _ in range(2)]
        for order in orders:
            order.rounds_ahead = rounds_ahead
        whole, first = (
            _rounds(orders[0], rounds_ahead, 0, 40, least),
            _rounds(orders[1], rounds_ahead, 0, interrupted, least),
        )
        state = json.loads(json.dumps(orders[1].state_dict()))
        resumed = SharedPermutation(length, shuffle=True, seed=3)
        resumed.rounds_ahead = rounds_ahead
        resumed.load_state_dict(state)
        passes_ended += resumed.remaining < least and len(first) < len(whole)
        assert resumed.holds(least) == (len(first) < len(whole)), "a resumed job looks before it goes on"
        visited = first + (_rounds(resumed, rounds_ahead, interrupted, 40, least) if resumed.holds(least) else [])
        assert visited == whole
        done = [i for r in visited for i in r]
        assert len(set(done)) == len(done) > length - least
    if rounds_ahead and (least, length) == (9, 40):
        assert passes_ended, "a pass was over, and only with what comes back is there enough for another round"


def test_taking_beyond_the_end_is_an_error():
    order = SharedPermutation(4)
    order.take(RoundPlan.of([4]), 0)
    with pytest.raises(ValueError, match=r"epoch.*start the next"):
        order.take(RoundPlan.of([4]), 0)


def test_the_state_of_another_order_is_refused_with_what_differs():
    state = SharedPermutation(60, shuffle=True, seed=4).state_dict()
    with pytest.raises(ValueError, match=r"\{'seed': 4\}.*\{'seed': 5\}.*resume"):
        SharedPermutation(60, shuffle=True, seed=5).load_state_dict(state)
    with pytest.raises(ValueError, match=r"version 9.*version 2.*resume"):
        SharedPermutation(60).load_state_dict(state | {"version": 9})
