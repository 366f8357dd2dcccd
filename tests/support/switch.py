"""The switch between the hosts of `support.namespaces`: a process that makes them and carries their packets.

Run as ``python switch.py DIRECTORY MTU name...``, by its path and with the standard library only, so that it starts at
once. DIRECTORY is the owner's, for what commands on the hosts need.

Each host is a network, a UTS and a mount namespace: interfaces, a host name and an ``/etc/hosts`` of its own. Its one
interface is a TUN device. This process reads each packet, lets it pass the links of its sender and its receiver, and
writes it to the receiver's device when it is due. So any kernel with TUN devices will do: ``tc`` can hold back packets
only where the kernel has netem, and many have not.

A *link* joins a host to the switch. With r its rate, a packet of b bits leaves the sender at

    t = max(now, end of the packet before) + b / r,        reaches the switch at t + delay,

and leaves the receiver's link no sooner than b / r (of that link) after the packet before. So delays count once, when
it leaves, as netem's would on the sender's interface, and the slower of the two links limits the flow. What would
wait longer than a buffer holds is dropped, and so are packets of a link that is cut, those on their way included.

The namespaces have no names. They end with this process and the last one inside, so a killed run leaves nothing. This
process ends with its standard input. Then it ends what still runs on the hosts, and removes the directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import math
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

KINDS = {"net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}
"""Kinds of namespaces that make a host, with the kernel's flag for each."""
INTERFACE = "net0"
NETWORK = "10.77.0"
_BUFFER_S, _LEAST_BUFFERED = 0.1, 32  # seconds and packets that wait at a link (arbitrary; switches have about that)
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PATIENCE_S = 2.0


def address(host: int) -> str:
    """Return the address of a host, counted from 0."""
    return f"{NETWORK}.{host + 1}"


class Lane:
    """One direction of a link: packets leave it one after the other."""

    def __init__(self) -> None:
        self.rate_bit_s = math.inf
        self._free_at = 0.0

    def leaves(self, first_s: float, size: int) -> float | None:
        """Return when a packet has left whose last bit could leave at ``first_s``; None if the buffer is full."""
        takes_s = 8 * size / self.rate_bit_s
        at = max(first_s, self._free_at + takes_s)
        if at - first_s > max(_BUFFER_S, _LEAST_BUFFERED * takes_s):
            return None
        self._free_at = at
        return at


class Link:
    """What joins one host to the switch."""

    def __init__(self) -> None:
        self.out, self.back = Lane(), Lane()
        self.delay_s = 0.0
        self.cut = False

    def change(self, **to: float) -> None:
        """Set delay, rate, or whether it is cut."""
        for name, value in to.items():
            if name == "rate_bit_s":
                self.out.rate_bit_s = self.back.rate_bit_s = value
            else:
                setattr(self, name, value)

    def sends(self, now_s: float, size: int) -> float | None:
        """Return when a packet that is sent now reaches the switch; None if it never does."""
        if self.cut:
            return None
        at = self.out.leaves(now_s + 8 * size / self.out.rate_bit_s, size)
        return None if at is None else at + self.delay_s


class Switch:
    """Carries packets between devices. ``receive`` takes one, ``deliver`` hands over what is due."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._due: list[tuple[float, int, int, int, bool, bytes]] = []  # time, number, from, to, has passed both links
        self._count = 0

    def receive(self, source: int, packet: bytes, now_s: float) -> None:
        """Take a packet from a host. What is not for a host of this network is dropped."""
        to = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the last byte of the destination
        if not 0 <= to < len(self._links):
            return
        at = self._links[source].sends(now_s, len(packet))
        if at is not None:
            self._push(at, source, to, False, packet)

    def deliver(self, now_s: float) -> list[tuple[int, bytes]]:
        """Return the packets that are due, with the host that each is for."""
        out = []
        while self._due and self._due[0][0] <= now_s:
            due_s, _, source, to, passed, packet = heapq.heappop(self._due)
            if self._links[source].cut or self._links[to].cut:
                continue
            if not passed:
                at = self._links[to].back.leaves(due_s, len(packet))
                if at is not None and at > now_s:
                    self._push(at, source, to, True, packet)
                if at is None or at > now_s:
                    continue
            out.append((to, packet))
        return out

    def next_s(self) -> float | None:
        """Return when the next packet is due."""
        return self._due[0][0] if self._due else None

    def _push(self, at: float, source: int, to: int, passed: bool, packet: bytes) -> None:
        self._count += 1
        heapq.heappush(self._due, (at, self._count, source, to, passed, packet))


def _new_host(number: int, name: str, hosts: str, mtu: int) -> tuple[int, dict[str, int]]:
    """Move to a new host and make its device; return the device, and descriptors that hold the namespaces."""
    libc = ctypes.CDLL(None, use_errno=True)

    def ask(call: str, *given: object) -> None:
        if getattr(libc, call)(*given) != 0:
            raise OSError(ctypes.get_errno(), f"{call} for a host's namespaces: {os.strerror(ctypes.get_errno())}")

    ask("unshare", sum(KINDS.values()))
    if number == 0:  # further hosts begin with a copy of its mounts
        ask("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)  # or the machine would see the next one, too
        ask("mount", hosts.encode(), b"/etc/hosts", None, _MS_BIND, None)
    socket.sethostname(name)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    for command in (
        "link set lo up",
        f"address add {address(number)}/24 dev {INTERFACE}",
        f"link set dev {INTERFACE} mtu {mtu} txqueuelen 1000 up",
    ):
        subprocess.run(["ip", *command.split()], check=True, timeout=10.0, capture_output=True, text=True)
    return device, {kind: os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in KINDS}


def _make(names: Sequence[str], mtu: int) -> tuple[list[int], list[dict[str, int]]]:
    lines = [f"{address(number)} {name}" for number, name in enumerate(names)]
    with tempfile.NamedTemporaryFile("w", prefix="hvd-hetero-hosts-") as file:  # the mounts keep it when it is gone
        file.write("\n".join(["127.0.0.1 localhost", *lines, ""]))
        file.flush()
        os.chmod(file.name, 0o644)
        made = [_new_host(number, name, file.name, mtu) for number, name in enumerate(names)]
    return [device for device, _ in made], [held for _, held in made]


def _end_inhabitants(namespaces: set[str], doors: bytes) -> None:
    """End what still runs on the hosts, or is about to: politely first, then by force."""
    for number, patience_s in ((signal.SIGTERM, _PATIENCE_S), (signal.SIGKILL, _PATIENCE_S)):
        until = time.monotonic() + patience_s
        found = _inhabitants(namespaces, doors)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while found and time.monotonic() < until:
            time.sleep(0.02)
            found = _inhabitants(namespaces, doors)
        if not found:
            return


def _inhabitants(namespaces: set[str], doors: bytes) -> list[int]:
    """Return who is in the namespaces, or names a door to them: nsenter has opened it and enters in a moment."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has just ended
            # First the command: who has gone through by then runs another one, and is inside.
            enters = doors in Path(f"/proc/{pid}/cmdline").read_bytes()
            if pid != os.getpid() and (enters or os.readlink(f"/proc/{pid}/ns/net") in namespaces):
                found.append(pid)
    return found


def _say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(directory: str, mtu: int, names: Sequence[str]) -> None:
    """Make the hosts, tell where they are, and carry packets until standard input ends."""
    try:
        devices, held = _make(names, mtu)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd)}: {error.stderr.strip()}")
    except OSError as error:
        sys.exit(str(error))
    me = os.getpid()
    namespaces = {os.readlink(f"/proc/self/fd/{of['net']}") for of in held}
    paths = [{kind: f"/proc/{me}/fd/{descriptor}" for kind, descriptor in of.items()} for of in held]
    _say(json.dumps(paths))
    with contextlib.suppress(OSError):  # before processes that compute, or packets would be late
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    links = [Link() for _ in names]
    switch = Switch(links)
    while True:
        next_s = switch.next_s()
        timeout_s = None if next_s is None else max(0.0, next_s - time.monotonic())
        ready, _, _ = select.select([0, *devices], [], [], timeout_s)
        if 0 in ready:
            if not (line := os.read(0, 4096)):  # one short order, since each is waited for
                break
            order = json.loads(line)
            links[order.pop("host")].change(**order)
            _say()
        for source, device in enumerate(devices):
            if device in ready:
                with contextlib.suppress(BlockingIOError):
                    while packet := os.read(device, 65536):
                        switch.receive(source, packet, time.monotonic())
        for to, packet in switch.deliver(time.monotonic()):
            with contextlib.suppress(BlockingIOError):  # full: dropped, as in a network
                os.write(devices[to], packet)
    for descriptor in (descriptor for of in held for descriptor in of.values()):
        os.close(descriptor)  # nobody opens a door from now on, so none comes in after the search for them
    _end_inhabitants(namespaces, f"/proc/{me}/fd/".encode())
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
