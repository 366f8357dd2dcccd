"""Parts of unequal length that ranks read alone: all end their epoch in one round, without an empty one."""

from __future__ import annotations

from itertools import count

import pytest

from hvd_hetero.balancer import Balancer
from hvd_hetero.data.stream_orders import EndingShard
from hvd_hetero.policies import BSP, StaticAllocation
from hvd_hetero.rounds import RoundPlan


def ranks(policy, parts, batch):
    """The balancer and the shard of each rank, whose parts have so many samples."""
    return [
        (
            Balancer(policy(), rank, len(parts), batch, clock=count().__next__),
            EndingShard(lambda epoch, part=part, rank=rank: ((rank, i) for i in range(part)), rank, len(parts)),
        )
        for rank, part in enumerate(parts)
    ]


def play_round(group):
    """One round of all ranks, as an adapter drives it; returns what each had, and what the sum is multiplied by."""
    had, rows = [], []
    for balancer, shard in group:
        cut = shard.take(balancer.plan(), balancer.rank)
        for work in cut.micro_batches():
            balancer.begin(work)
            if not work.last:
                balancer.pause()
        rows.append(balancer.report(ended=shard.ends_after(cut.samples)))
        had.append(cut.part)
    factors = [balancer.agree(sum(rows)) for balancer, _ in group]
    assert len(set(factors)) == 1
    for balancer, shard in group:
        table = balancer.finished.table
        shard.finish(table.figures("samples"), table.figures("ended"))
    return had, factors[0]


def play_epoch(group, epoch=0):
    for _, shard in group:
        shard.start(epoch)
    rounds = []
    while group[0][1].holds(1):
        had, _ = play_round(group)
        assert any(had), "no round without samples"
        rounds.append([len(samples) for samples in had])
        assert len({shard.holds(1) for _, shard in group}) == 1
    return rounds


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((8, 8), [[4, 4], [4, 4]]),
        ((9, 3), [[4, 3], [4, 0], [1, 0]]),
        ((4, 12), [[4, 4], [0, 4], [0, 4]]),
        ((1, 1), [[1, 1]]),
    ],
)
def test_an_epoch_ends_for_all_when_the_last_part_has_ended(parts, expected):
    assert play_epoch(ranks(BSP, parts, 8)) == expected


def test_every_epoch_begins_at_the_front():
    group = ranks(BSP, (5, 2), 4)
    assert play_epoch(group) == play_epoch(group, 1) == [[2, 2], [2, 0], [1, 0]]


def test_the_weights_of_a_round_in_which_a_part_ends_make_a_mean_of_what_was_done():
    group = ranks(BSP, (9, 3), 8)
    had, factor = play_round(group)
    weights = [balancer.work.samples / balancer.work.plan.total for balancer, _ in group]
    assert [w * factor for w in weights] == pytest.approx([4 / 7, 3 / 7])
    assert [len(samples) for samples in had] == [4, 3]


def test_micro_batches_of_a_part_that_ends_are_no_larger_than_planned():
    plan = RoundPlan((7, 9), (2, 3))
    assert plan.sizes(1, 4) == (2, 2)
    assert plan.sizes(1, 1) == (1,)
    assert plan.sizes(1, 0) == ()
    assert plan.sizes(1, 9) == plan.sizes(1) == (3, 3, 3)


def test_ranks_without_a_share_get_one_when_all_others_have_ended():
    assert play_epoch(ranks(lambda: StaticAllocation([0, 1]), (3, 4), 4)) == [[0, 4], [3, 0]]


def test_a_plan_without_ranks_that_have_ended_ends_when_all_are_done():
    plan = RoundPlan((4, 2, 6), (2, 1, 3), "first")
    assert plan.without([False] * 3) is plan
    assert plan.without([False, True, False]) == RoundPlan((4, 0, 6), (2, 0, 3), "all")


def test_a_state_goes_on_where_every_rank_stood():
    group = ranks(BSP, (9, 3), 4)
    play_round(group)
    state = group[0][1].state_dict()
    assert state == group[1][1].state_dict()
    other = ranks(BSP, (9, 3), 4)
    for _, shard in other:
        shard.load_state_dict(state)
    assert play_round(other)[0] == play_round(group)[0] == [[(0, 2), (0, 3)], [(1, 2)]]
    with pytest.raises(ValueError, match=r"state.* 2 ranks.* 1\b.*resume"):
        EndingShard(lambda epoch: iter(range(9)), 0, 1).load_state_dict(state)
    shorter = EndingShard(lambda epoch: iter(range(1)), 1, 2)
    shorter.load_state_dict(state)
    with pytest.raises(ValueError, match=r"state.* 2 samples.* 1\b.*resume"):
        shorter.take(RoundPlan.of([2, 1]), 1)
