"""How channels find each other: addresses, the exchange, and what does not fit together."""

import contextlib
import gc
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from signal_groups import Group, eventually

from hvd_hetero.communication.signals import Limits, SignalChannel
from hvd_hetero.communication.signals import addresses as addressing
from hvd_hetero.communication.signals.frames import KEY_BYTES, Identity, Session
from hvd_hetero.errors import HeteroError


@pytest.mark.parametrize(
    "addresses",
    [["::1"], ["localhost"], ["::1", "127.0.0.1"], ["no-such-host.invalid", "127.0.0.1"], ["192.0.2.1", "127.0.0.1"]],
)
def test_addresses(addresses):
    """IPv6, names, several candidates, and candidates that do not exist, or are not ours, beside one that is."""
    if "::1" in addresses and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    with Group(2, addresses=addresses) as group:
        group.works()


def has_ipv6():
    with suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return True
    return False


def test_candidates_are_tried_in_turn():
    """The first address of a peer leads nowhere, the second to it."""

    def misled(payloads):
        entry = json.loads(payloads[1])
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            entry["addresses"].insert(0, unused.getsockname())
        return [payloads[0], json.dumps(entry).encode()]

    with Group(2, meddle=misled) as group:
        group.works()


def alone(change=lambda entries: entries, **options):
    """What rank 0 of 2 makes of an exchange in which rank 1's payload, and the order, are as `change` has them."""

    def exchange(payload):
        mine = json.loads(payload)
        entries = change([mine, mine | {"rank": 1, "key": ""}])
        return [entry if isinstance(entry, bytes) else json.dumps(entry).encode() for entry in entries]

    return SignalChannel(0, 2, exchange, **({"addresses": ["127.0.0.1"]} | options))


EXCHANGES = {
    "too few": (lambda e: e[:1], "in order of rank"),
    "out of order": (lambda e: e[::-1], "in order of rank"),
    "another size": (lambda e: [e[0], e[1] | {"size": 3}], "the same size"),
    "another generation": (lambda e: [e[0], e[1] | {"generation": 9}], "the same generation"),
    "another version": (lambda e: [e[0], e[1] | {"version": 1}], "version"),
    "not ours": (lambda e: [e[0], b"\x80nonsense"], "no signal channel"),
    "an unreachable rank": (lambda e: [e[0], e[1] | {"addresses": [], "troubles": "no luck"}], "rank 1 .*no luck"),
}


@pytest.mark.parametrize(("change", "says"), EXCHANGES.values(), ids=EXCHANGES)
def test_exchange_that_does_not_fit(change, says):
    """Ranks that disagree, or a collective that is no allgather: an error that says so, on every rank alike."""
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(HeteroError, match=says):
        alone(change)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_cannot_listen_takes_part_in_the_exchange():
    """It tells the others why instead of leaving them waiting; then all raise."""
    with pytest.raises(HeteroError, match=r"rank 0 .*no-such-host\.invalid.*horovodrun --network-interface"):
        alone(addresses=["no-such-host.invalid"])


def test_unreachable_rank_is_said_once(caplog):
    """A peer whose address leads nowhere: training goes on, one line in the log says it, retries get rarer."""
    limits = Limits(first_retry_s=1e-4, last_retry_s=1e-3)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        lost = unused.getsockname()
    with alone(lambda e: [e[0], e[1] | {"addresses": [lost]}], limits=limits) as channel:
        eventually(lambda: "cannot be reached for signals" in caplog.text)
        time.sleep(0.05)
        channel.raise_signal(1)
        assert channel.raised(1)
        assert channel.connected == frozenset()
        assert not channel.wait_connected(0)
    assert caplog.text.count("cannot be reached") == 1


def test_loopback_of_another_host_is_not_tried():
    """A loopback address given by a rank of another host name would lead to ourselves: nobody calls it."""
    seen, loopback = ["192.0.2.7", 7], ["127.0.1.1", 7]
    with alone(
        lambda e: [e[0] | {"addresses": [seen]}, e[1] | {"host": "x", "addresses": [loopback, seen]}]
    ) as channel:
        assert channel._loop._calls[1]._addresses == (tuple(seen),)


def test_a_host_that_others_cannot_reach_is_told_on_all_ranks():
    """Its own name means loopback, and it has no other address: rounds would wait for the slowest, and say nothing."""
    with pytest.raises(HeteroError, match=r"rank 0 .*has loopback addresses alone .*--network-interface.*/etc/hosts"):
        alone(lambda e: [e[0], e[1] | {"host": "elsewhere"}])


def test_a_host_whose_name_means_loopback_listens_on_its_interfaces_too(monkeypatch):
    monkeypatch.setattr(addressing.socket, "gethostname", lambda: "localhost")
    everywhere = ["127.0.0.1", "127.0.0.2", "fe80::1%eth0"]
    monkeypatch.setattr(addressing, "_interfaces", lambda name=None: everywhere if name is None else [])
    listeners, troubles = addressing.listen([])
    with contextlib.ExitStack() as stack:
        found = {stack.enter_context(listener).getsockname()[0] for listener in listeners}
    assert {"127.0.0.1", "127.0.0.2"} <= found <= {"127.0.0.1", "127.0.0.2", "::1"}, troubles
    assert all(isinstance(ip, str) for ip in addressing._interfaces())


@pytest.mark.parametrize(("interface", "only_loopback"), [("lo", True), ("no-such-interface", False)])
def test_ranks_listen_at_the_interface_that_horovod_uses(monkeypatch, interface, only_loopback):
    """It is what `horovodrun --network-interface` names. One that this host does not have counts as none."""
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", interface)
    monkeypatch.setattr(addressing.socket, "gethostname", lambda: "127.0.0.3")
    listeners, troubles = addressing.listen([])
    with contextlib.ExitStack() as stack:
        found = {stack.enter_context(listener).getsockname()[0] for listener in listeners}
    assert ("127.0.0.3" not in found) == only_loopback, troubles
    assert "127.0.0.1" in found


@pytest.mark.parametrize(
    "job_keys", [[b"this job's"] * 2, [b"this job's", b"another's"], [b"this job's", b""], [b""] * 2]
)
def test_what_is_read_on_the_network_does_not_open_the_signals_where_all_ranks_have_the_jobs_key(job_keys):
    """Elsewhere, under a launcher that hands out none, all ranks still get the same key."""
    told, gate = [b"", b""], threading.Barrier(2)

    def directory(rank):
        def exchange(payload):
            told[rank] = payload
            gate.wait(10)
            return told

        listeners, troubles = addressing.listen(["127.0.0.1"])
        with contextlib.ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(listener)
            return addressing.exchange_directory(rank, 2, 0, listeners, troubles, exchange, job_keys[rank])

    with ThreadPoolExecutor(2) as pool:
        first, second = (each.key for each in pool.map(directory, range(2)))
    assert first == second
    assert len(first) == KEY_BYTES
    assert (first.hex() in told[0].decode()) == (job_keys[0] != job_keys[1] or job_keys[0] == b"")
    assert not any(key and key in payload for key in job_keys for payload in told)


def test_channels_take_the_jobs_key_from_their_environment(monkeypatch):
    """Where `horovodrun` puts it; it works, and not with the key that rank 0 told."""
    monkeypatch.setenv("_HOROVOD_SECRET_KEY", "of this job")
    with Group(2) as group:
        with group.stranger(1) as sock:
            sock.sendall(Session(Identity(0, 0, group.key), calls=1).next_frame(0))
            assert sock.recv(1) == b"", "no welcome"
        assert group[1].refused == 1
        group.works()


ARGUMENTS = {
    "size": ({"size": 0}, "size must be"),
    "rank": ({"rank": 2}, "rank must be .* from 0 to 1"),
    "generation": ({"generation": -1}, "generation must be"),
    "addresses": ({"addresses": "localhost"}, r"write \['localhost'\]"),
}


@pytest.mark.parametrize(("wrong", "says"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments(wrong, says):
    """Wrong arguments are named, with the rule and the value."""
    arguments = {"rank": 0, "size": 2, "exchange": lambda payload: [payload] * 2} | wrong
    with pytest.raises((ValueError, TypeError), match=says):
        SignalChannel(**arguments)


@pytest.mark.parametrize("round", [-1, 2**64 - 1, 1.5, "3", None])
def test_round_numbers(round):
    """A round is a whole number that fits the frame."""
    with SignalChannel(0, 1, exchange=None) as channel, pytest.raises(ValueError, match="round must be"):
        channel.raise_signal(round)


@pytest.mark.parametrize("wrong", [{"handshake_s": 0}, {"strangers": -1}, {"last_retry_s": float("nan")}])
def test_limits(wrong):
    """Limits are positive and finite."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Limits(**wrong)


def test_the_default_addresses_work():
    """With no addresses given, ranks of one host find each other."""
    with Group(2, addresses=[]) as group:
        group.works()
        assert len(group.key) == KEY_BYTES
