"""Hosts on one machine with a delay between them: network namespaces whose packets a relay forwards later.

    with DelayedLink(one_way_s=0.005) as link:
        print(link.round_trip_s())
        launch(script, 2, starter=link.starter)

Each host is a network namespace with a TUN device. The relay, a separate process, reads every packet, keeps it for the
delay, and writes it to the device of its destination. It needs no netem, so any kernel with TUN devices will do.
Packets are large (`MTU`), because a packet costs the relay as much time as a few kilobytes.

A host also has a name, which is its address. Horovod 0.28.1 makes a second set of Gloo contexts, for the global process
set, at the address that the host's name resolves to; HOROVOD_GLOO_IFACE does not change that.

The namespaces have no names: they and the devices end with the relay and the last rank. The relay ends with its
standard input, so it never outlives this process. It needs root, ``ip`` and ``nsenter``.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType

DEVICE = "delayed0"
MTU = 65000
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_STARTS_WITHIN_S = 20.0


def address(host: int) -> str:
    """Return the address of a host, counted from 0, in the link's network."""
    return f"10.77.0.{host + 1}"


def missing() -> str | None:
    """Return in one line what is missing for a link here, or None."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "a delayed link needs root on Linux, for its network namespaces; run it with sudo"
    if lacks := [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]:
        return f"a delayed link needs {' and '.join(lacks)}; install iproute2 and util-linux"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "a delayed link needs /dev/net/tun; load the kernel module tun"
    return None


class DelayedLink:
    """Hosts that reach each other through packets that take ``one_way_s`` each way; a context manager."""

    def __init__(self, one_way_s: float, hosts: int = 2) -> None:
        if why := missing():
            raise RuntimeError(why)
        self._relay = subprocess.Popen(
            [sys.executable, __file__, "relay", str(one_way_s), str(hosts)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,  # a Ctrl-C is for this process, which then ends the relay
        )  # fmt: skip
        try:
            self._hosts = _line_of(self._relay).split()
        except BaseException:
            self.close()
            raise

    @property
    def starter(self) -> list[str]:
        """Return a command for ``launch`` that starts one rank on each host."""
        return [*_on(self._hosts[0]), sys.executable, __file__, "ranks", *self._hosts, "--"]

    def on(self, host: int) -> list[str]:
        """Return the prefix that runs a command on a host, counted from 0."""
        return _on(self._hosts[host])

    def round_trip_s(self, times: int = 30) -> float:
        """Return the median time of one byte from host 0 to host 1 and back, by TCP."""
        server = subprocess.Popen(
            [*_on(self._hosts[1]), sys.executable, __file__, "echo", address(1)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            port = _line_of(server).strip()
            client = subprocess.run(
                [*_on(self._hosts[0]), sys.executable, __file__, "ask", address(1), port, str(times)],
                capture_output=True, text=True, timeout=_STARTS_WITHIN_S, check=True,
            )  # fmt: skip
        finally:
            _end(server)
        return float(client.stdout)

    def close(self) -> None:
        """Remove the link."""
        _end(self._relay)

    def __enter__(self) -> DelayedLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _on(host: str) -> list[str]:
    """Return the prefix that runs a command on a host, given by the paths of its namespaces."""
    net, uts = host.split(",")
    return [shutil.which("nsenter") or "nsenter", f"--net={net}", f"--uts={uts}"]


def _line_of(process: subprocess.Popen[str]) -> str:
    """Return the first line that a process prints within a time limit."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _STARTS_WITHIN_S)
    line = process.stdout.readline() if ready else ""
    if not line:
        raise RuntimeError(f"{' '.join(process.args[1:3])} did not start within {_STARTS_WITHIN_S:g} s")  # type: ignore[index]
    return line


def _end(process: subprocess.Popen[str]) -> None:
    """Close the input of a process of this file, so that it ends, and kill it if it does not."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(2.0)
    assert process.stdout is not None
    process.stdout.close()


# What runs in processes of its own.


def _new_host(number: int) -> tuple[int, str]:
    """Move to a new host and make its device; return the device, and the paths of the host's namespaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET | _CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "no new namespaces")
    socket.sethostname(address(number))
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    for command in (
        "link set lo up",
        f"address add {address(number)}/24 dev {DEVICE}",
        f"link set dev {DEVICE} mtu {MTU} txqueuelen 10000 up",
    ):
        subprocess.run(["ip", *command.split()], check=True, timeout=_STARTS_WITHIN_S)
    held = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts")]
    return tun, ",".join(f"/proc/{os.getpid()}/fd/{namespace}" for namespace in held)


def _relay(one_way_s: float, hosts: int) -> None:
    """Forward packets after the delay, until standard input ends."""
    devices, namespaces = zip(*map(_new_host, range(hosts)), strict=True)
    print(*namespaces, flush=True)
    with contextlib.suppress(OSError):  # before ranks that compute, or packets would be late
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()  # in order, as all wait equally long
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([0, *devices], [], [], timeout_s)
        if 0 in ready:
            return
        for device in ready:
            with contextlib.suppress(BlockingIOError):
                while packet := os.read(device, 65536):
                    to = packet[19] - 1  # the last byte of the destination
                    if packet[0] >> 4 == 4 and 0 <= to < hosts:  # not what IPv6 looks for
                        waiting.append((time.monotonic() + one_way_s, devices[to], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, device, packet = waiting.popleft()
            with contextlib.suppress(BlockingIOError):  # full: dropped, as in a network
                os.write(device, packet)


def _ranks(hosts: Sequence[str], command: Sequence[str]) -> int:
    """Run a command as one rank per host, as horovodrun would; return the first exit code that is not 0."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    names = ",".join(f"{address(number)}:1" for number in range(len(hosts)))
    slots = get_host_assignments(parse_hosts(names), len(hosts))
    rendezvous = RendezvousServer()
    port = rendezvous.start(host=address(0))
    rendezvous.init(slots)
    shared = create_run_env_vars(address(0), [DEVICE], port)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for host, slot in zip(hosts, slots, strict=True):
            variables = {key: str(value) for key, value in (shared | create_slot_env_vars(slot)).items()}
            ranks.append(subprocess.Popen([*_on(host), *command], env=os.environ | variables))
        running = dict(enumerate(ranks))
        while running:
            for rank, process in list(running.items()):
                if (code := process.poll()) is not None:
                    del running[rank]
                    if code != 0:
                        print(f"Process {rank} exit with status code {code}.", flush=True)
                        return code if code > 0 else 128 - code
            time.sleep(0.05)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.terminate()
        for process in ranks:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
        rendezvous.stop()
    return 0


def _echo(at: str) -> None:
    """Send back every byte of one connection, until that or standard input ends."""
    with socket.create_server((at, 0)) as server:
        print(server.getsockname()[1], flush=True)
        if 0 in select.select([0, server], [], [], _STARTS_WITHIN_S)[0]:
            return
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_STARTS_WITHIN_S)
            while byte := connection.recv(1):
                connection.sendall(byte)


def _ask(at: str, port: int, times: int) -> None:
    """Print the median seconds of a byte to a host and back."""
    took = []
    with socket.create_connection((at, port), timeout=_STARTS_WITHIN_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(times):
            began = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            took.append(time.perf_counter() - began)
    print(statistics.median(took))


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    if what == "relay":
        _relay(float(given[0]), int(given[1]))
    elif what == "ranks":
        end = given.index("--")
        raise SystemExit(_ranks(given[:end], given[end + 1 :]))
    elif what == "echo":
        _echo(given[0])
    elif what == "ask":
        _ask(given[0], int(given[1]), int(given[2]))
