"""Ranks that torchrun has started again, and its store, which has the addresses of those that are gone."""

from datetime import timedelta

import pytest
from torch import distributed as dist

from hvd_hetero.errors import HeteroError
from torch_hooks.wires import restarts

ADDRESSES = [f"default_pg/{group}//cpu//0/{rank}" for group in (0, 1) for rank in (0, 1)]
OTHERS = ["none/torchelastic/role_info/0", "mine/default_pg/0//cpu//0/0"]


@pytest.fixture
def starts(monkeypatch):
    """A store that a first start has used, and a function that begins one of these ranks again."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    for key in (*ADDRESSES, *OTHERS):
        store.set(key, "of the first start")

    def start(rank, number, agents="True"):
        settings = {"RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
        settings |= {"TORCHELASTIC_RESTART_COUNT": number, "TORCHELASTIC_USE_AGENT_STORE": agents}
        for name, value in settings.items():
            monkeypatch.setenv(name, str(value))
        restarts.forget_former_ranks()

    return store, start


def test_the_first_rank_clears_the_addresses_of_ranks_that_are_gone_and_nothing_else(starts):
    store, start = starts
    start(0, 1)
    assert not any(store.check([key]) for key in ADDRESSES)
    assert store.check(OTHERS)


def test_it_clears_them_once_in_each_restart(starts):
    """A program that a rank calls may import the package, too, when the ranks have met."""
    store, start = starts
    start(0, 1)
    start(1, 1)
    store.set(ADDRESSES[1], "of the second start")
    start(0, 1)
    assert store.check([ADDRESSES[1]])
    start(0, 2)
    assert not store.check([ADDRESSES[1]])


def test_a_rank_whose_first_rank_is_not_started_again_ends_with_a_message(starts, monkeypatch):
    monkeypatch.setattr(restarts, "_RANK_0_WAITS_S", 0.2)
    store, start = starts
    with pytest.raises(HeteroError, match=r"rank 1 .*rank 0 .*0\.2 s.*restart 1"):
        start(1, 1)
    assert store.check(ADDRESSES)


@pytest.mark.parametrize(("number", "agents"), [(0, "True"), (1, "False")])
def test_a_first_start_and_a_store_of_its_own_are_left_alone(starts, number, agents):
    store, start = starts
    start(0, number, agents)
    assert store.check(ADDRESSES)
