"""A rank that gives up closes its connections, whatever holds Python's lock."""

import os

import pytest
from limits import TORCH_S

pytestmark = pytest.mark.distributed


def test_nobody_waits_for_a_rank_that_gives_up_while_its_main_thread_holds_pythons_lock(launch, tmp_path):
    """Rank 3 is cut off. Ranks 0 and 2 notice, and rank 1 by their closed connections, while they hold the lock."""
    for rank in range(4):
        os.mkfifo(tmp_path / str(rank))
    reports = launch("lock_held.py", 4, [tmp_path], framework="torch", timeout_s=TORCH_S).reports
    assert reports == (1, "HorovodInternalError", 1, None), "ranks 0 and 2 were told before their time was up"
