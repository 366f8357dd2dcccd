"""Hosts on one machine: what their links do to packets, and that nothing of them stays."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from pids import ended
from support import namespaces
from support.namespaces import Hosts, hosts_available

SUPPORT = hosts_available()
needs_hosts = pytest.mark.skipif(not SUPPORT, reason=SUPPORT.why)


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
    with pytest.raises(ValueError, match=r"delay_s.*rate_bit_s.*speed=3\.0"):
        hosts.link(0, speed=3.0)


# What nsenter does, slowly: it opens the namespaces, and then enters them.
SLOWLY = 'exec 5<"$1"; echo; sleep 1; exec nsenter --net=/proc/self/fd/5 sleep 60'


@needs_hosts
@pytest.mark.parametrize(
    "inside",
    [
        pytest.param("[*hosts.on(0), 'sh', '-c', 'echo; exec sleep 60']", id="inside"),
        pytest.param(f"['sh', '-c', {SLOWLY!r}, 'sh', hosts.on(0)[1].removeprefix('--net=')]", id="entering"),
    ],
)
def test_a_killed_owner_leaves_no_process_no_host_and_no_file(inside):
    text = (
        "import subprocess, time\nfrom support.namespaces import Hosts\nhosts = Hosts(1)\n"
        f"inside = subprocess.Popen({inside}, stdout=subprocess.PIPE)\ninside.stdout.readline()\n"
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
