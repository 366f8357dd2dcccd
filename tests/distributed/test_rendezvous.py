"""Ranks find each other with some requests to the launcher each, and without its help with them."""

import pytest
from limits import TORCH_S

pytestmark = pytest.mark.distributed
PLACES = {
    "one host": [(0, 0, 3, 0, 1), (1, 1, 3, 0, 1), (2, 2, 3, 0, 1)],
    "two hosts": [(0, 0, 2, 0, 2), (1, 1, 2, 0, 1), (2, 0, 1, 1, 2)],
}
# Of three meetings: all ranks and those of a host or of two hosts; of the process set [0, 2], all and the same again.
MEMBERS = {"one host": 3 * (3 + 3 + 2 + 2), "two hosts": 3 * (3 + 2 + 2 + 2 + 2)}


@pytest.fixture(scope="module")
def ranks(launch):
    return launch("rendezvous.py", 3, framework="torch", timeout_s=TORCH_S).reports


@pytest.mark.parametrize("launcher", ["edited", "released"])
@pytest.mark.parametrize("hosts", PLACES)
def test_ranks_meet_again_and_again_and_each_process_set_sums_over_its_own(ranks, hosts, launcher):
    """A launcher of a released Horovod is asked key by key."""
    for rank, place in enumerate(PLACES[hosts]):
        sums = [111.0] if rank == 1 else [101.0, 111.0]
        assert ranks[rank][f"{hosts}, {launcher}"]["met"] == [{"sums": sums, "place": list(place)}] * 3


@pytest.mark.parametrize("hosts", PLACES)
def test_a_rank_puts_its_addresses_asks_for_the_others_and_says_that_it_is_done(ranks, hosts):
    """Whatever the number of ranks, and not at all where it is alone."""
    members = MEMBERS[hosts]
    assert ranks[0][f"{hosts}, edited"]["asked"] == {"PUT": members, "GET of all": members, "DELETE": members}


@pytest.mark.parametrize("hosts", PLACES)
def test_a_launcher_without_an_answer_is_asked_for_all_once_and_for_each_address_once_it_is_there(ranks, hosts):
    asked = ranks[0][f"{hosts}, released"]["asked"]
    assert (asked["PUT"], asked["GET of all"], asked["DELETE"]) == (MEMBERS[hosts],) * 3
    assert asked["GET"] >= MEMBERS[hosts]
