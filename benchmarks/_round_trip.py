"""How long a byte takes from one host to another and back, by TCP."""

from __future__ import annotations

import subprocess
import sys

from _support import Hosts

_PORT, _LIMIT_S = 7000, 20.0
_ANSWER = f"""
import socket
with socket.create_server(("", {_PORT})) as server:
    print(flush=True)
    connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while byte := connection.recv(1):
            connection.sendall(byte)
"""
_ASK = f"""
import socket, statistics, sys, time
took = []
with socket.create_connection((sys.argv[1], {_PORT}), timeout={_LIMIT_S}) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(int(sys.argv[2])):
        began = time.perf_counter()
        connection.sendall(b"x")
        connection.recv(1)
        took.append(time.perf_counter() - began)
print(statistics.median(took))
"""


def round_trip_s(hosts: Hosts, times: int = 30) -> float:
    """Return the median seconds of so many round trips between the first two hosts."""
    with subprocess.Popen([*hosts.on(1), sys.executable, "-S", "-c", _ANSWER], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        try:
            asked = subprocess.run(
                [*hosts.on(0), sys.executable, "-S", "-c", _ASK, hosts.names[1], str(times)],
                capture_output=True, text=True, timeout=_LIMIT_S, check=True,
            )  # fmt: skip
        finally:
            server.kill()  # it may still wait to be asked
    return float(asked.stdout)
