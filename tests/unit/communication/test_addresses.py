"""How ranks find each other: addresses, the gather, and what does not fit together."""

import contextlib
import json

import pytest

from hvd_hetero.communication import addresses as addressing
from hvd_hetero.communication.thread_wire import wire_of_this_thread
from hvd_hetero.errors import HeteroError
from hvd_hetero.testing import run_on_threads


def heard_at():
    """The addresses at which this rank listens, and its troubles."""
    listeners, troubles = addressing.listen()
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(listener).getsockname()[0] for listener in listeners], troubles


@pytest.mark.parametrize("host", ["::1", "localhost", "127.0.0.3"])
def test_addresses(monkeypatch, host):
    """IPv6 and names, as the interface's own and as the host's."""
    monkeypatch.setattr(addressing, "_interfaces", lambda name=None: [host])
    if not (found := heard_at()[0]):
        pytest.skip(f"this machine has no {host}")
    assert len(found) == 1 or host == "localhost"


@pytest.mark.parametrize("missing", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_ours_counts_as_none(monkeypatch, missing):
    monkeypatch.setattr(addressing, "_interfaces", lambda name=None: [missing, "127.0.0.1"])
    found, troubles = heard_at()
    assert found == ["127.0.0.1"]
    assert missing in troubles


def gathered(change):
    """What rank 0 of two makes of an entry of rank 1 that differs."""

    def gather(payload):
        mine = json.loads(payload)
        return [json.dumps(entry).encode() for entry in (mine, mine | {"key": ""} | change)]

    sockets, troubles = addressing.listen()
    with contextlib.ExitStack() as stack:
        for sock in sockets:
            stack.enter_context(sock)
        return addressing.gather_directory(0, 2, sockets, troubles, gather)


@pytest.mark.parametrize(
    ("change", "says"), [({"version": 1}, "version"), ({"addresses": [], "troubles": "no luck"}, "rank 1 .*no luck")]
)
def test_what_is_gathered_and_does_not_fit_is_an_error_on_every_rank_alike(change, says):
    with pytest.raises(HeteroError, match=says):
        gathered(change)


def test_a_rank_that_cannot_listen_takes_part_in_the_gather(monkeypatch):
    """It tells the others why instead of leaving them waiting; then all raise."""
    monkeypatch.setattr(addressing, "_interfaces", lambda name=None: ["no-such-host.invalid"])
    told = []

    def gather(payload):
        told.append(payload)
        return [payload, payload]

    with pytest.raises(HeteroError, match=r"rank 0 .*no-such-host\.invalid.*--network-interface"):
        addressing.gather_directory(0, 2, *addressing.listen(), gather)
    assert len(told) == 1


@pytest.mark.parametrize("interfaces", [True, False])
def test_a_rank_without_descriptors_says_so_and_raises_nothing(monkeypatch, interfaces):
    """So it takes part in the gather that follows. It raised, and the others waited for it, for ever."""

    def none_left(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(addressing.socket, "socket", none_left)
    if not interfaces:
        monkeypatch.setattr(addressing.psutil, "net_if_addrs", none_left)
    found, troubles = heard_at()
    assert found == []
    assert "Too many open files" in troubles


def test_loopback_of_another_host_is_not_tried():
    """A loopback address given by a rank of another host name would lead to ourselves: nobody calls it."""
    seen, loopback = ["192.0.2.7", 7], ["127.0.1.1", 7]

    def gather(payload):
        mine = json.loads(payload) | {"key": "00" * 32, "addresses": [loopback, seen]}
        return [json.dumps(entry).encode() for entry in (mine, mine | {"host": "x"})]

    found = addressing.gather_directory(0, 2, [], "", gather)
    assert found.addresses == ((tuple(loopback), tuple(seen)), (tuple(seen),))


def test_a_host_that_others_cannot_reach_is_told_on_all_ranks(monkeypatch):
    """Its own name means loopback, and it has no other address: rounds would wait for the slowest, and say nothing."""
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    with pytest.raises(HeteroError, match=r"rank 0 .*loopback.*--network-interface.*/etc/hosts"):
        gathered({"host": "elsewhere"})


def test_a_host_whose_name_means_loopback_listens_on_its_interfaces_too(monkeypatch):
    monkeypatch.setattr(addressing.socket, "gethostname", lambda: "localhost")
    everywhere = ["127.0.0.1", "127.0.0.2", "fe80::1%eth0"]
    monkeypatch.setattr(addressing, "_interfaces", lambda name=None: everywhere if name is None else [])
    found, troubles = heard_at()
    assert {"127.0.0.1", "127.0.0.2"} <= {*found} <= {"127.0.0.1", "127.0.0.2", "::1"}, troubles
    assert all(isinstance(ip, str) for ip in addressing._interfaces())


@pytest.mark.parametrize("variable", ["HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME"])
@pytest.mark.parametrize(
    ("interface", "only_loopback"), [("lo", True), ("no-such-interface", False), ("no-such-interface,lo", True)]
)
def test_ranks_listen_at_the_interface_that_horovod_or_torch_uses(monkeypatch, variable, interface, only_loopback):
    """It is what `horovodrun --network-interface` names. One that this host does not have counts as none."""
    monkeypatch.setenv(variable, interface)
    monkeypatch.setattr(addressing.socket, "gethostname", lambda: "127.0.0.3")
    found, troubles = heard_at()
    assert ("127.0.0.3" not in found) == only_loopback, troubles
    assert "127.0.0.1" in found


def test_ranks_of_horovods_launcher_do_not_go_by_torchs_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setattr(addressing.socket, "gethostname", lambda: "127.0.0.3")
    found, troubles = heard_at()
    assert "127.0.0.3" in found, troubles


@pytest.mark.parametrize(
    "job_keys", [[b"this job's"] * 2, [b"this job's", b"another's"], [b"this job's", b""], [b""] * 2]
)
def test_what_is_read_on_the_network_does_not_open_the_channel_where_all_ranks_have_the_jobs_key(job_keys):
    """Elsewhere, under a launcher that hands out none, all ranks still get the same key."""
    told = [b"", b""]

    def directory(rank):
        def gather(payload):
            told[rank] = payload
            return wire_of_this_thread().allgather_object(payload, "addresses")

        listeners, troubles = addressing.listen()
        with contextlib.ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(listener)
            return addressing.gather_directory(rank, 2, listeners, troubles, gather, job_keys[rank])

    first, second = (each.key for each in run_on_threads(directory, 2))
    assert first == second
    assert len(first) == 32
    assert (first.hex() in told[0].decode()) == (job_keys[0] != job_keys[1] or job_keys[0] == b"")
    assert not any(key and key in payload for key in job_keys for payload in told)
