"""Division by cost: invariants, all divisions and branch and bound as oracles, and how micro-batches are cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_hetero.allocation.by_cost import cut, divide, divide_padded, latest, needed, room


def finish(costs, padded, shares, ranks) -> list[float]:
    """F of the ranks with a positive share, by the definition."""
    times = []
    for rank, share in enumerate(shares):
        mine = [s for s, at in enumerate(ranks) if at == rank]
        if share:
            longest = max((int(padded[s]) for s in mine), default=0)
            times.append((sum(int(costs[s]) for s in mine) + len(mine) * longest) / int(share))
    return times


def optimum(costs, padded, shares, least=1) -> float:
    """The best of all divisions."""
    ways = itertools.product(range(len(shares)), repeat=len(costs))
    legal = (way for way in ways if all(way.count(rank) >= least for rank in range(len(shares))))
    return min(max(finish(costs, padded, shares, way)) for way in legal)


def instance(rng: np.random.Generator, samples: int, ranks: int):
    """Log-normal costs, padding for lengths like these, and shares from 1 to 1/4."""
    costs = np.rint(rng.lognormal(0, 1, samples) * 1000).astype(np.int64)
    return costs, 3 * costs + 5, np.rint(1000 / rng.uniform(1, 4, ranks)).astype(np.int64)


@st.composite
def divisions(draw: st.DrawFn):
    """Costs with ties, zeros and large numbers, ranks without a share, and a least number that can be kept."""
    ranks = draw(st.integers(1, 6))
    shares = draw(st.lists(st.integers(0, 5) | st.integers(0, 10**6), min_size=ranks, max_size=ranks).filter(any))
    least = draw(st.integers(0, 3))
    number = st.integers(0, 3) | st.integers(0, 2**40)
    fewest = max(1, max(least, 1) * sum(x > 0 for x in shares))
    samples = draw(st.lists(st.tuples(number, number), min_size=fewest, max_size=fewest + 30))
    return [c for c, _ in samples], [p for _, p in samples], shares, least


@given(divisions())
def test_each_sample_is_with_a_rank_that_has_a_share_and_each_such_rank_has_the_least(division):
    """Whatever the numbers; and `latest` is the definition's."""
    costs, padded, shares, least = division
    plain, together = divide(costs, shares, least=least), divide_padded(costs, padded, shares, least=least)
    for ranks, of in ((plain, [0] * len(costs)), (together, padded)):
        counts = np.bincount(ranks, minlength=len(shares))
        assert counts.sum() == len(costs)
        assert all(count >= least if share else count == 0 for count, share in zip(counts, shares, strict=True))
        if any(costs) or any(of):
            assert latest(costs, of, shares, ranks) == max(finish(costs, of, shares, ranks))


@pytest.mark.parametrize("padding", [False, True])
def test_few_samples_are_divided_as_well_as_by_trying_all_ways(padding):
    """Within 1 % of the optimum for 5 to 8 samples on 2 or 3 ranks, with one or two samples each at least."""
    rng = np.random.default_rng(0)
    for turn in range(40):
        costs, padded, shares = instance(rng, int(rng.integers(5, 9)), int(rng.integers(2, 4)))
        least = 1 + turn % 2 if costs.size >= 2 * shares.size else 1
        padded = padded if padding else np.zeros_like(costs)
        call = divide_padded(costs, padded, shares, least=least) if padding else divide(costs, shares, least=least)
        assert latest(costs, padded, shares, call) <= 1.01 * optimum(costs, padded, shares, least)


def test_many_samples_reach_the_bound():
    """Within 1 % of what no division is better than, from 30 samples on 4 ranks to 1,000 on 64."""
    rng = np.random.default_rng(1)
    for samples, ranks in ((30, 3), (60, 4), (200, 8), (1000, 64)):
        for _ in range(5):
            costs, _, shares = instance(rng, samples, ranks)
            bound = max(costs.sum() / shares.sum(), costs.max() / shares.max())
            assert latest(costs, 0, shares, divide(costs, shares)) <= 1.01 * bound


def test_samples_of_similar_length_stay_together_where_batches_are_padded():
    """If lengths are all that counts, padding costs less than a quarter of what it costs without regard to it."""
    rng = np.random.default_rng(2)
    costs, _, shares = instance(rng, 256, 8)
    nothing = np.zeros_like(costs)
    bound = costs.sum() / shares.sum()
    together = latest(nothing, costs, shares, divide_padded(nothing, costs, shares)) - bound
    apart = latest(nothing, costs, shares, divide(costs, shares)) - bound
    assert together < apart / 4


def test_runs_of_equal_lengths_are_equal_shares():
    """Samples that are all alike are divided by number, padded or not."""
    alike = np.full(60, 7)
    for ranks in (divide(alike, [1, 2, 3]), divide_padded(alike, alike, [1, 2, 3]), divide(0 * alike, [1, 2, 3])):
        assert np.bincount(ranks).tolist() == [10, 20, 30]


def test_a_sample_costlier_than_any_share_goes_to_the_fastest_rank_alone():
    ranks = divide([1000, 1, 2, 3, 4], [1, 3, 2])
    assert ranks[0] == 1
    assert (ranks[1:] != 1).all()


@pytest.mark.parametrize(
    ("costs", "shares", "least", "message"),
    [
        ([1, 2, 3], [1, 1], 2, "3 samples and 2 positive shares"),
        ([1, 2], [0, 0], 1, "2 samples and 0 positive shares"),
        ([2**52, 2**52], [1, 1], 1, "below 2"),
        ([1, -1], [1, 1], 1, "at least 0"),
    ],
)
def test_what_cannot_be_divided_is_named(costs, shares, least, message):
    with pytest.raises(ValueError, match=message):
        divide(costs, shares, least=least)


def test_room_and_needed_are_the_limit():
    """Ten samples: number times longest stays within 100, with as few micro-batches as any contiguous cut."""
    lengths = np.array([120.0, 60, 50, 40, 30, 30, 20, 10, 5, 0])
    most = room(lengths, 100.0)
    assert most.tolist() == [1, 1, 2, 2, 3, 3, 5, 10, 10, 10]
    assert needed(most) == 5  # 120 | 60 | 50, 40 | 30, 30, 20 | 10, 5, 0
    rng = np.random.default_rng(3)
    for _ in range(50):
        lengths = np.sort(rng.integers(0, 50, rng.integers(1, 9)))[::-1]
        largest = float(rng.integers(50, 120))
        cuts = itertools.product([False, True], repeat=lengths.size - 1)
        fits = [
            len(parts)
            for marks in cuts
            for parts in [np.split(lengths, np.flatnonzero(marks) + 1)]
            if all(len(part) * part[0] <= largest for part in parts)
        ]
        assert needed(room(lengths, largest)) == min(fits)


def test_micro_batches_are_of_nearly_equal_cost_and_keep_to_the_room():
    """The costliest is within 1 % of the best contiguous cut's; with a limit, each keeps to it."""
    rng = np.random.default_rng(4)
    for _ in range(50):
        padded = np.sort(np.rint(rng.lognormal(0, 1, rng.integers(4, 10)) * 100).astype(np.int64))[::-1] + 1
        costs, count = padded // 4, int(rng.integers(1, 5))

        def costliest(sizes, costs=costs, padded=padded):
            parts = np.split(np.arange(costs.size), np.cumsum(sizes)[:-1])
            return max(costs[part].sum() + part.size * padded[part[0]] for part in parts)

        ways = [w for w in itertools.product(range(1, costs.size + 1), repeat=count) if sum(w) == costs.size]
        assert costliest(cut(costs, padded, count)) <= 1.01 * min(map(costliest, ways))
        most = room(padded, 1.5 * padded[0])
        more = max(needed(most), count)
        sizes = cut(costs, padded, more, most)
        assert len(sizes) == more
        assert sum(sizes) == costs.size
        starts = np.cumsum((0, *sizes[:-1]))
        assert all(0 < size <= most[start] for size, start in zip(sizes, starts, strict=True))
