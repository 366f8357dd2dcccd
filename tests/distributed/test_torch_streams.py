"""Iterable datasets: whole streams are dealt like data with random access, shards go on for ever."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.distributed
SAMPLES = 131


@pytest.fixture(scope="module")
def ranks(pool):
    with pool("torch_streams.py", 3, "torch") as ranks:
        yield ranks


@pytest.mark.parametrize("policy", ["bsp", "micro-batches", "static", "lb-bsp", "non-blocking", "elastic-bsp", "local"])
def test_each_sample_of_a_whole_stream_goes_to_one_rank_once_an_epoch(ranks, policy):
    seen = ranks[0]["whole_streams"][policy]["seen"]
    for epoch in range(2):
        assert sorted(i for rank in seen for i in rank[epoch]) == list(range(SAMPLES))
    assert len({tuple(rank["whole_streams"][policy]["end"]) for rank in ranks}) == 1


@pytest.mark.parametrize("policy", ["bsp", "micro-batches", "static"])
def test_a_whole_stream_trains_as_random_access_does(ranks, policy):
    """To rounding: of three ranks, which two are added first depends on what Horovod fuses, and so on time."""
    for rank in ranks:
        outcome = rank["whole_streams"][policy]
        assert outcome["same samples"]
        assert outcome["off"] <= 1e-13


def test_worker_processes_read_a_stream(ranks):
    seen = ranks[0]["worker_processes"]["seen"]
    assert sorted(i for rank in seen for i in rank[0]) == list(range(SAMPLES))


def test_drop_last_leaves_the_end_of_a_stream_out(ranks):
    outcome = ranks[0]["left_out"]
    assert sorted(i for rank in outcome["seen"] for i in rank[1]) == list(range(120))
    assert outcome["rounds"] == 10


@pytest.mark.parametrize("policy", ["bsp", "static", "non-blocking"])
def test_a_shard_is_visited_in_order_and_begins_again(ranks, policy):
    outcome = ranks[0]["shards"][policy]
    assert outcome["rounds"] == 14
    for rank, epochs in enumerate(outcome["seen"]):
        mine = list(range(rank, SAMPLES, len(ranks)))
        visited = epochs[0] + epochs[1]
        assert visited == (mine * 10)[: len(visited)]
    assert len({tuple(rank["shards"][policy]["end"]) for rank in ranks}) == 1


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("not chosen", r"ValueError: stream must be 'whole' or 'shard', got None: .*rounds_per_epoch=…"),
        ("no length", r"ValueError: rounds_per_epoch is the length of an epoch of shards.*give the number of rounds"),
        ("two lengths", r"ValueError: rounds_per_epoch is .*leave it out"),
        ("shuffled", r"ValueError: shuffle=True needs.*shuffle inside the stream, and a whole stream alike"),
        ("random access", r"ValueError: stream and rounds_per_epoch are for an IterableDataset.*leave them out"),
        ("neither", r"ValueError: dataset must have __len__ and __getitem__.*generator is neither.*balance.batch\("),
        ("empty", r"ValueError: epoch 0 has 0 samples, fewer than a round needs \(1\)"),
        ("too short", r"ValueError: epoch 0 has 5 samples, fewer than a round needs \(8\).*drop_last"),
        ("chained", "nothing was refused"),
        ("workers", "ValueError: prefetch_factor"),
        ("unknown", r"TypeError: the length of this loader is not known"),
    ],
)
def test_mistakes_are_told_with_the_way_out(ranks, attempt, message):
    for rank in ranks:
        assert re.match(message, rank["refusals"][attempt])


@pytest.mark.parametrize("case", ["longer", "longer, dropping", "elastic", "readers", "rounds"])
def test_a_stream_that_ends_alone_is_found_out_before_a_rank_waits_for_one_that_has_gone(ranks, case):
    for rank in ranks:
        assert re.match(r"PlanMismatchError: round \d+: ranks .* follow another plan", rank["ends_alone"][case])


def test_samples_that_wait_hold_no_files_open(ranks):
    assert ranks[0]["many_samples_that_wait"]["seen"] == list(range(600))


def test_a_loop_that_is_left_and_another_loader_in_between_lose_and_repeat_nothing(ranks):
    for rank in ranks:
        outcome = rank["left_and_alternating"]
        assert outcome["in order"]
        assert outcome["seen"] == 12
        assert outcome["state"] == [12] * len(ranks)
