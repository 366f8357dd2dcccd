"""Out of memory beside DDP, FSDP2 and Horovod: done again in parts, or the end of all ranks, with words."""

from __future__ import annotations

import re

import pytest

from hvd_hetero.testing import RankError

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(request, pool):
    with pool("torch_memory.py", 2, request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("ranks", ["torch.distributed"], indirect=True, scope="module")
@pytest.mark.parametrize(
    "case",
    [
        "one", "also past DDP", "views", "in the loss", "in the loss, unused", "in the loss, k = 2", "k = 2",
        "k = 2, views", "k = 2, twice",
    ],
)  # fmt: skip
def test_a_batch_that_does_not_fit_is_done_again_in_parts_and_exact(ranks, case):
    require_exact(ranks, case)


@pytest.mark.parametrize("ranks", ["torch"], indirect=True, scope="module")
@pytest.mark.parametrize(
    "case", ["one", "cleared to zeros", "in the loss", "k = 2", "k = 2, cleared before", "k = 2, twice"]
)
def test_beside_horovods_optimizer_it_is_done_again_too(ranks, case):
    require_exact(ranks, case)


def require_exact(ranks, case):
    for rank in range(2):
        outcome = ranks[rank][case]
        assert outcome["difference"] <= 1e-9
        assert set(outcome["sizes"]) == {24 if "k = 2" in case else 12}
    assert ranks[0][case]["failed"] >= (2 if "twice" in case else 1)
    assert 0 < ranks[0][case]["limit"] <= 5


@pytest.mark.parametrize(
    ("wire", "how", "place", "guarded"),
    [
        ("torch.distributed", "ddp", "backward", "guarded"),
        ("torch.distributed", "fsdp", "forward", "guarded"),
        ("torch.distributed", "fsdp", "forward", "unguarded"),
        ("Horovod", "horovod", "backward", "guarded"),
    ],
)
def test_where_a_collective_may_have_begun_all_ranks_end_with_the_same_words(launch, wire, how, place, guarded):
    framework = {"torch.distributed": "torch.distributed", "Horovod": "torch"}[wire]
    with pytest.raises(RankError) as caught:
        launch("torch_memory.py", 2, [how, place, guarded], framework=framework, timeout_s=100.0)
    first, second = caught.value.result.stderr
    words = r"round 3: rank 0 ran out of memory .*set max_micro_batch of the policy below 6"
    assert re.search(words, second)
    assert "rank 0 ends the job" in second
    if guarded == "guarded":
        assert re.search(words, first)
        assert caught.value.result.reports[0] <= 10.0
