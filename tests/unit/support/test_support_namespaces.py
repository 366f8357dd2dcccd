"""Hosts on one machine: what their links do to packets, and that nothing of them stays."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from pids import ended
from support import namespaces
from support.namespaces import Hosts, HostsUnavailableError, hosts_available
from support.switch import Lane, Link, Switch

SUPPORT = hosts_available()
needs_hosts = pytest.mark.skipif(not SUPPORT, reason=SUPPORT.why)


def packet(to, size=1000):
    return bytes([0x45, *[0] * 15, 10, 77, 0, to + 1]).ljust(size, b"\0")


def switch(count=2, **properties):
    links = [Link(seed=number) for number in range(count)]
    for link in links:
        link.change(**properties)
    return links, Switch(links)


def arrivals(switched):
    """When each packet comes, and to which host."""
    found = []
    while (due_s := switched.next_s()) is not None:
        found += [(round(due_s, 9), to) for to, _ in switched.deliver(due_s)]
    return found


def test_a_packet_takes_the_delay_of_its_sender():
    links, switched = switch(delay_s=0.005)
    links[1].change(delay_s=0.5)
    switched.receive(0, packet(1), 10.0)
    assert arrivals(switched) == [(10.005, 1)]


def test_packets_of_a_burst_arrive_at_the_rate_and_after_the_delay():
    _, switched = switch(rate_bit_s=8000.0, delay_s=0.5)  # 1000 bytes a second
    for _ in range(3):
        switched.receive(0, packet(1), 0.0)
    assert arrivals(switched) == [(1.5, 1), (2.5, 1), (3.5, 1)]


def test_two_senders_share_the_rate_of_the_receiver():
    _, switched = switch(3, rate_bit_s=8000.0)
    switched.receive(0, packet(2), 0.0)
    switched.receive(1, packet(2), 0.0)
    assert arrivals(switched) == [(1.0, 2), (2.0, 2)]


def test_a_slow_receiver_limits_a_fast_sender():
    links, switched = switch()
    links[1].change(rate_bit_s=8000.0)
    for _ in range(2):
        switched.receive(0, packet(1), 0.0)
    assert [round(at, 6) for at, _ in arrivals(switched)] == [1.0, 2.0]


def test_what_would_wait_longer_than_the_buffer_holds_is_dropped():
    lane = Lane()
    lane.rate_bit_s = 8000.0
    passed = [lane.leaves(1.0, 1000) for _ in range(100)]
    assert passed[:3] == [1.0, 2.0, 3.0]
    assert passed.count(None) == 100 - 33  # the first one does not wait
    assert lane.leaves(200.0, 1000) == 200.0


def test_a_share_of_packets_is_lost_and_the_same_ones_each_time():
    def lost():
        links, _ = switch(loss=0.1)
        return [number for number in range(2000) if links[0].sends(0.0, 100) is None]

    assert lost() == lost()
    assert 140 <= len(lost()) <= 260  # four standard deviations are 54


def test_a_cut_loses_packets_both_ways_and_those_on_their_way():
    links, switched = switch(delay_s=1.0)
    switched.receive(0, packet(1), 0.0)
    links[1].change(cut=True)
    switched.receive(0, packet(1), 0.5)
    switched.receive(1, packet(0), 0.5)
    assert arrivals(switched) == []
    links[1].change(cut=False)
    switched.receive(1, packet(0), 2.0)
    assert arrivals(switched) == [(3.0, 0)]


def test_what_is_for_no_host_of_the_network_is_dropped():
    _, switched = switch()
    for stray in (packet(7), bytes([0x60]) + bytes(60)):  # the latter is of IPv6
        switched.receive(0, stray, 0.0)
    assert arrivals(switched) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"count": 0}, r"count.* 0"),
        ({"delay_s": -1.0}, r"delay_s.* -1\.0"),
        ({"rate_bit_s": 0}, r"rate_bit_s.* 0"),
        ({"loss": 1.0}, r"loss.* 1\.0"),
        ({"mtu": 100}, r"mtu.* 100"),
        ({"delay_s": math.nan}, "delay_s"),
    ],
)
def test_mistakes_are_named(given, said):
    with pytest.raises(ValueError, match=said):
        Hosts(**given)


def test_where_hosts_cannot_be_made_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert "hosts need root on Linux" in hosts_available().why
    with pytest.raises(HostsUnavailableError, match="root"):
        Hosts(2)


def test_what_hinders_the_switch_is_said(monkeypatch, tmp_path):
    """As in a container that may not make namespaces."""
    refuses = tmp_path / "switch.py"
    refuses.write_text("raise SystemExit('unshare: not permitted')")
    monkeypatch.setattr(namespaces, "_missing", lambda: "")
    monkeypatch.setattr(namespaces.switch, "__file__", str(refuses))
    support = hosts_available()
    assert not support
    assert "unshare: not permitted" in support.why


ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    took = []
    while len(took) < 5 or min(took) >= float(sys.argv[3]) and len(took) < 100:  # a busy machine delays most of them
        began = time.perf_counter()
        connection.sendall(b"x")
        said = connection.recv(100).decode()
        took.append(time.perf_counter() - began)
print(said, min(took))
"""
ANSWER = """
import socket
with socket.create_server(("", 7000)) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(100):
                connection.sendall(socket.gethostname().encode())
"""


def ask(hosts, other, *, patience_s=20.0, within_s=1.0):
    command = [*hosts.on(0), sys.executable, "-S", "-c", ASK, other, str(patience_s), str(within_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def hosts():
    """Two hosts, the second of which says its name to whoever asks."""
    with Hosts(2, delay_s=0.01) as hosts:
        server = subprocess.Popen([*hosts.on(1), sys.executable, "-S", "-c", ANSWER], stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "ready\n"
        yield hosts
    server.stdout.close()
    assert server.wait(20) == -signal.SIGTERM  # whatever still runs on the hosts ends with them


@needs_hosts
def test_hosts_reach_one_another_by_name_and_address_until_the_link_is_cut_and_when_it_is_mended(hosts):
    for other in (hosts.names[1], hosts.addresses[1]):
        name, round_trip_s = ask(hosts, other, within_s=0.2).stdout.split()
        assert name == "host1"
        assert 0.02 <= float(round_trip_s) < 0.2
    hosts.link(0, delay_s=0.05)
    assert 0.06 <= float(ask(hosts, "host1", within_s=0.3).stdout.split()[1]) < 0.3
    hosts.cut(1)
    assert "timed out" in ask(hosts, "host1", patience_s=1.0).stderr
    hosts.mend(1)
    assert ask(hosts, "host1").stdout.startswith("host1")
    with pytest.raises(ValueError, match=r"host.* 2"):
        hosts.cut(2)
    with pytest.raises(ValueError, match=r"delay_s, rate_bit_s, loss.*'speed'"):
        hosts.link(0, speed=3.0)


@needs_hosts
def test_the_machine_keeps_its_name_and_its_hosts(hosts):
    with open("/etc/hosts") as file:
        assert "host1" not in file.read()
    assert socket.gethostname() not in hosts.names
    assert hosts.interface not in psutil.net_if_addrs()


@needs_hosts
def test_commands_run_in_the_directory_they_are_given_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Hosts(1) as hosts:
        assert subprocess.check_output([*hosts.on(0), "pwd"], text=True).strip() == str(tmp_path)


@needs_hosts
def test_what_stands_in_for_ssh_runs_a_command_on_the_host_as_horovodrun_asks(monkeypatch, tmp_path):
    (tmp_path / "horovodrun").write_text("")
    with Hosts(2) as hosts:
        starter = hosts.horovodrun(2, python=str(tmp_path / "python"))
        assert starter[starter.index("-H") + 1] == "host0:2,host1:2"
        monkeypatch.setenv("PATH", next(part for part in starter if part.startswith("PATH="))[5:])
        for options in ("host1 -p 12", "-o A=b -i key host1 -o ConnectTimeout=3"):
            command = f"echo key | ssh {options} \"read -r K; export K;\" 'hostname; printenv K'"
            assert subprocess.check_output(command, shell=True, text=True) == "host1\nkey\n"
        strange = subprocess.run(["ssh", "elsewhere", "true"], capture_output=True, text=True, check=False)
        assert strange.returncode == 255
        assert "there is no host elsewhere here" in strange.stderr


@needs_hosts
def test_a_killed_owner_leaves_no_process_no_host_and_no_file():
    text = (
        "import subprocess, time\nfrom support.namespaces import Hosts\nhosts = Hosts(1)\n"
        "inside = subprocess.Popen([*hosts.on(0), 'sleep', '60'])\n"
        "print(hosts._switch.pid, inside.pid, hosts._directory, flush=True)\ntime.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(namespaces.__file__).parents[1])}
    owner = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, env=env)
    *pids, directory = owner.stdout.readline().split()
    pids = [int(pid) for pid in pids]
    assert os.path.isdir(directory)
    assert all(map(psutil.pid_exists, pids))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert ended(*pids)
    assert not os.path.exists(directory)


@needs_hosts
def test_a_switch_that_has_ended_is_said():
    hosts = Hosts(1)
    os.kill(hosts._switch.pid, signal.SIGKILL)
    hosts._switch.wait()
    with pytest.raises(HostsUnavailableError, match="switch"):
        hosts.cut(0)
    hosts.close()
