"""How ranks find each other: addresses, the gather, and what does not fit together."""

import contextlib
import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import pytest
from signal_groups import PATIENT_S, Group, Root, eventually, say, threads_and_descriptors

from hvd_hetero.communication import addresses as addressing
from hvd_hetero.communication import signals
from hvd_hetero.errors import HeteroError


@pytest.mark.parametrize("host", ["::1", "localhost", "127.0.0.3"])
def test_addresses(monkeypatch, host):
    """IPv6 and names, as the interface's own and as the host's."""
    monkeypatch.setattr(addressing, "_interfaces", lambda name=None: [host])
    if not addressing.listen()[0]:
        pytest.skip(f"this machine has no {host}")
    with Group(2) as group:
        group.works()
        assert len(addresses_of(group, 0)) == 1 or host == "localhost"


def addresses_of(group, rank):
    return json.loads(group.payloads[rank])["addresses"]


@pytest.mark.parametrize("missing", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_ours_counts_as_none(monkeypatch, missing):
    monkeypatch.setattr(addressing, "_interfaces", lambda name=None: [missing, "127.0.0.1"])
    listeners, troubles = addressing.listen()
    with contextlib.ExitStack() as stack:
        assert [stack.enter_context(listener).getsockname()[0] for listener in listeners] == ["127.0.0.1"]
    assert missing in troubles


def unused():
    """An address at which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()


def test_candidates_are_tried_in_turn():
    """The first address of a peer leads nowhere, the second to it."""

    def misled(payloads):
        entry = json.loads(payloads[0])
        entry["addresses"].insert(0, unused())
        return [json.dumps(entry).encode(), *payloads[1:]]

    with Group(2, meddle=misled) as group:
        group.works()


def test_a_candidate_that_says_nothing_is_given_up(monkeypatch):
    """The first address of a peer leads to a program that accepts and waits."""
    monkeypatch.setattr(signals, "_READ_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def misled(payloads):
            entry = json.loads(payloads[0])
            entry["addresses"].insert(0, silent.getsockname())
            return [json.dumps(entry).encode(), *payloads[1:]]

        with Group(2, meddle=misled) as group:
            group.works()


GATHERED = {
    "too few": (lambda e: e[:1], "in order of rank"),
    "out of order": (lambda e: e[::-1], "in order of rank"),
    "another size": (lambda e: [e[0], e[1] | {"size": 3}], "size should be"),
    "another version": (lambda e: [e[0], e[1] | {"version": 1}], "version"),
    "not ours": (lambda e: [e[0], b"\x80nonsense"], "no rank of this version"),
    "an unreachable rank": (lambda e: [e[0], e[1] | {"addresses": [], "troubles": "no luck"}], "rank 1 .*no luck"),
}


@pytest.mark.parametrize(("change", "says"), GATHERED.values(), ids=GATHERED)
def test_what_is_gathered_and_does_not_fit(change, says):
    """Ranks that disagree, or a collective that is no allgather: an error that says so, on every rank alike."""
    before = threads_and_descriptors()
    with pytest.raises(HeteroError, match=says):
        Root(change=change)
    eventually(lambda: threads_and_descriptors() <= before)


def test_a_rank_that_cannot_listen_takes_part_in_the_gather(monkeypatch):
    """It tells the others why instead of leaving them waiting; then all raise."""
    monkeypatch.setattr(addressing, "_interfaces", lambda name=None: ["no-such-host.invalid"])
    told = []

    def gather(payload):
        told.append(payload)
        return [payload, json.dumps(json.loads(payload) | {"rank": 1}).encode()]

    with pytest.raises(HeteroError, match=r"rank 0 .*no-such-host\.invalid.*horovodrun --network-interface"):
        signals.SignalChannel(0, 2, gather)
    assert len(told) == 1


@pytest.mark.parametrize("lacking", [{socket.SOCK_DGRAM}, {socket.SOCK_DGRAM, socket.SOCK_STREAM}], ids=len)
def test_a_rank_without_descriptors_says_so_and_raises_nothing(monkeypatch, lacking):
    """So it takes part in the gather that follows. It raised, and the others waited for it, for ever."""
    before = threads_and_descriptors()
    plain = socket.socket

    def scarce(family=socket.AF_INET, kind=socket.SOCK_STREAM, *rest, **options):
        if kind in lacking:
            raise OSError(24, "Too many open files")
        return plain(family, kind, *rest, **options)

    def none_left():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(addressing.socket, "socket", scarce)
    if len(lacking) == 2:
        monkeypatch.setattr(addressing.psutil, "net_if_addrs", none_left)
    sockets, troubles = addressing.listen_to_packets()
    assert sockets == []
    assert "Too many open files" in troubles
    assert threads_and_descriptors() <= before


def test_unreachable_parent_is_said_once(caplog):
    """An address that leads nowhere: training goes on, one line in the log says it."""
    lost = [unused()]

    def gather(payload):
        mine = json.loads(payload)
        root_entry = mine | {"rank": 0, "key": "00" * 32, "addresses": lost}
        return [json.dumps(root_entry).encode(), payload]

    channel = signals.SignalChannel(1, 2, gather)
    eventually(lambda: "cannot reach its parent" in caplog.text)
    channel.raise_signal(1)
    assert channel.raised(1)
    assert not channel.wait_connected(0)
    channel.close()
    assert caplog.text.count("cannot reach") == 1


def test_a_parent_that_is_silent_at_first_is_called_until_it_answers(caplog, monkeypatch):
    """It takes its first ten calls and says nothing, as a stopped rank; one line in the log says it."""
    monkeypatch.setattr(signals, "_FIRST_PAUSE_S", 0.001)
    key = bytes(32)
    with socket.create_server(("127.0.0.1", 0)) as parent:

        def gather(payload):
            root = json.loads(payload) | {"rank": 0, "key": key.hex(), "addresses": [parent.getsockname()]}
            return [json.dumps(root).encode(), payload]

        channel = signals.SignalChannel(1, 2, gather)
        parent.settimeout(PATIENT_S)
        for _ in range(10):
            parent.accept()[0].close()
        with parent.accept()[0] as sock, Connection(os.dup(sock.fileno())) as link:
            sock.settimeout(None)
            deliver_challenge(link, key)
            answer_challenge(link, key)
            assert channel.wait_connected(PATIENT_S)
            say(link, 3)
            eventually(lambda: channel.raised(3))
            channel.close()
    assert caplog.text.count("cannot reach") == 1


def test_loopback_of_another_host_is_not_tried():
    """A loopback address given by a rank of another host name would lead to ourselves: nobody calls it."""
    seen, loopback = ["192.0.2.7", 7], ["127.0.1.1", 7]

    def gather(payload):
        mine = json.loads(payload) | {"key": "00" * 32, "addresses": [loopback, seen]}
        return [json.dumps(entry).encode() for entry in (mine, mine | {"rank": 1, "host": "x"})]

    found = addressing.gather_directory(0, 2, [], "", gather)
    assert found.addresses == ((tuple(loopback), tuple(seen)), (tuple(seen),))


def test_a_host_that_others_cannot_reach_is_told_on_all_ranks(monkeypatch):
    """Its own name means loopback, and it has no other address: rounds would wait for the slowest, and say nothing."""
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    with pytest.raises(HeteroError, match=r"rank 0 .*has loopback addresses alone .*--network-interface.*/etc/hosts"):
        Root(change=lambda e: [e[0], e[1] | {"host": "elsewhere"}])


def test_a_host_whose_name_means_loopback_listens_on_its_interfaces_too(monkeypatch):
    monkeypatch.setattr(addressing.socket, "gethostname", lambda: "localhost")
    everywhere = ["127.0.0.1", "127.0.0.2", "fe80::1%eth0"]
    monkeypatch.setattr(addressing, "_interfaces", lambda name=None: everywhere if name is None else [])
    listeners, troubles = addressing.listen()
    with contextlib.ExitStack() as stack:
        found = {stack.enter_context(listener).getsockname()[0] for listener in listeners}
    assert {"127.0.0.1", "127.0.0.2"} <= found <= {"127.0.0.1", "127.0.0.2", "::1"}, troubles
    assert all(isinstance(ip, str) for ip in addressing._interfaces())


@pytest.mark.parametrize("variable", ["HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME"])
@pytest.mark.parametrize(
    ("interface", "only_loopback"), [("lo", True), ("no-such-interface", False), ("no-such-interface,lo", True)]
)
def test_ranks_listen_at_the_interface_that_horovod_or_torch_uses(monkeypatch, variable, interface, only_loopback):
    """It is what `horovodrun --network-interface` names. One that this host does not have counts as none."""
    monkeypatch.setenv(variable, interface)
    monkeypatch.setattr(addressing.socket, "gethostname", lambda: "127.0.0.3")
    listeners, troubles = addressing.listen()
    with contextlib.ExitStack() as stack:
        found = {stack.enter_context(listener).getsockname()[0] for listener in listeners}
    assert ("127.0.0.3" not in found) == only_loopback, troubles
    assert "127.0.0.1" in found


def test_ranks_of_horovods_launcher_do_not_go_by_torchs_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setattr(addressing.socket, "gethostname", lambda: "127.0.0.3")
    listeners, troubles = addressing.listen()
    with contextlib.ExitStack() as stack:
        found = {stack.enter_context(listener).getsockname()[0] for listener in listeners}
    assert "127.0.0.3" in found, troubles


@pytest.mark.parametrize(
    "job_keys", [[b"this job's"] * 2, [b"this job's", b"another's"], [b"this job's", b""], [b""] * 2]
)
def test_what_is_read_on_the_network_does_not_open_the_signals_where_all_ranks_have_the_jobs_key(job_keys):
    """Elsewhere, under a launcher that hands out none, all ranks still get the same key."""
    told, gate = [b"", b""], threading.Barrier(2)

    def directory(rank):
        def gather(payload):
            told[rank] = payload
            gate.wait(10)
            return told

        listeners, troubles = addressing.listen()
        with contextlib.ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(listener)
            return addressing.gather_directory(rank, 2, listeners, troubles, gather, job_keys[rank])

    with ThreadPoolExecutor(2) as pool:
        first, second = (each.key for each in pool.map(directory, range(2)))
    assert first == second
    assert len(first) == 32
    assert (first.hex() in told[0].decode()) == (job_keys[0] != job_keys[1] or job_keys[0] == b"")
    assert not any(key and key in payload for key in job_keys for payload in told)


def test_channels_take_the_jobs_key_from_their_environment(monkeypatch):
    """Where `horovodrun` puts it; it works, and not with the key that rank 0 told."""
    monkeypatch.setenv("_HOROVOD_SECRET_KEY", "of this job")
    with Root() as alone, pytest.raises(AuthenticationError):
        alone.child()
    with Group(2) as group:
        group.works()
