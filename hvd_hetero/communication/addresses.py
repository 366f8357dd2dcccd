"""The addresses at which ranks listen, exchanged once by a collective that the caller gives.

A rank listens at each address that it is known by, never at the wildcard, on a port that the system chooses. It sends
the others all of them, and they try them in turn. Only ranks with the same host name try loopback addresses.

The key combines what rank 0 draws with the job's key, which the launcher of the Horovod that we build puts into each
rank's environment.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from hvd_hetero.errors import HeteroError

Address = tuple[str, int]
"""A numeric address and a port; IPv6 where the address has a colon."""

_VERSION = 5
_INTERFACE = "HOROVOD_GLOO_IFACE"
_INTERFACES_OF_TORCH = "GLOO_SOCKET_IFNAME"  # what torch.distributed reads
_LAUNCHED = "HOROVOD_RANK"  # by Horovod's launcher
_NAME_IT = "horovodrun --network-interface, or GLOO_SOCKET_IFNAME under torchrun"
_JOB_KEY = "_HOROVOD_SECRET_KEY"  # in the environment of launcher and ranks, by the Horovod that we build


def listen() -> tuple[list[socket.socket], str]:
    """Listen for UDP packets at each address by which other ranks may reach this one; return sockets and troubles.

    These are the addresses of the interface that Horovod's launcher has named to this rank. Without Horovod they are
    those of the interfaces that ``GLOO_SOCKET_IFNAME`` names for torch.distributed. Without either, they are those that
    the host's own name resolves to, then loopback. If that name means only loopback, as on many newly installed
    systems, the addresses of the host's interfaces follow.
    """
    listeners: dict[str, socket.socket] = {}
    troubles: list[str] = []
    try:
        of_torch = "" if _LAUNCHED in os.environ else os.environ.get(_INTERFACES_OF_TORCH, "")
        names = os.environ.get(_INTERFACE) or of_torch
        named = [ip for name in names.split(",") for ip in _interfaces(name.strip())]
        _listen(named or [socket.gethostname(), "127.0.0.1", "::1"], listeners, troubles)
        if not named and all(ipaddress.ip_address(ip).is_loopback for ip in listeners):
            _listen([ip for ip in _interfaces() if ip not in listeners], listeners, troubles)
    except OSError as error:  # this rank has no descriptors left; it still has to answer the others
        troubles.append(f"this host's interfaces: {error}")
    return list(listeners.values()), "; ".join(troubles)


def _interfaces(name: str | None = None) -> list[str]:
    """Return the addresses of one interface, or of all."""
    internet = (socket.AF_INET, socket.AF_INET6)
    there = psutil.net_if_addrs()
    chosen = there.values() if name is None else [there.get(name, [])]
    return [each.address for of in chosen for each in of if each.family in internet]


def _listen(names: Iterable[str], listeners: dict[str, socket.socket], troubles: list[str]) -> None:
    """Add the listeners at these names, by address, and the reasons of failures."""
    for name in names:
        try:
            found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM, proto=socket.IPPROTO_UDP)
        except OSError as error:
            troubles.append(f"{name}: {error}")
            continue
        for family, kind, protocol, _, where in found:
            ip = str(where[0])
            # A link-local IPv6 address means nothing without this host's own number of the interface. 16 addresses are
            # arbitrary: a host with more, as one of many containers, names the interface that counts.
            if ip in listeners or "%" in ip or ip.startswith("fe80:") or len(listeners) == 16:
                continue
            try:
                listener = socket.socket(family, kind, protocol)
            except OSError as error:  # IPv6 where the kernel has none
                troubles.append(f"{ip}: {error}")
                continue
            try:
                listener.setblocking(False)
                listener.bind((ip, 0))
            except OSError as error:
                listener.close()
                troubles.append(f"{ip}: {error}")
            else:
                listeners[ip] = listener


def job_key() -> bytes:
    """Return the key that Horovod's launcher gives only to the ranks of this job; empty under another launcher."""
    return os.environ.get(_JOB_KEY, "").encode()


@dataclass(frozen=True, slots=True)
class Directory:
    """What the ranks sent each other, in order of rank."""

    key: bytes
    addresses: tuple[tuple[Address, ...], ...]
    """The addresses at which this rank may reach each other one."""
    hosts: tuple[str, ...] = ()
    """Names of the ranks' hosts."""


def gather_directory(
    rank: int,
    size: int,
    listeners: Sequence[socket.socket],
    troubles: str,
    gather: Callable[[bytes], Sequence[bytes]],
    job_key: bytes = b"",
) -> Directory:
    """Gather all ranks' addresses, whatever this rank's state: if it stayed away, the others would wait for it.

    Every rank judges the same entries, so if they do not fit together all ranks raise.
    """
    own = {
        "version": _VERSION,
        "host": socket.gethostname(),
        "addresses": [listener.getsockname()[:2] for listener in listeners],
        "troubles": troubles,
        "key": secrets.token_hex(hashlib.sha256().digest_size) if rank == 0 else "",
        # A digest, not the key itself: the job's key is never sent, so reading the network is not enough to take part.
        "job": hmac.new(job_key, b"side channel: is it the same job?", hashlib.sha256).hexdigest() if job_key else "",
    }
    entries: list[dict[str, Any]] = [json.loads(payload) for payload in gather(json.dumps(own).encode())]
    if (versions := [entry["version"] for entry in entries]) != [_VERSION] * size:
        raise HeteroError(
            f"all ranks must run the same version of hvd-hetero, got {versions}; install one on all hosts"
        )
    for number, entry in enumerate(entries):
        if not entry["addresses"]:
            raise HeteroError(
                f"rank {number} ({entry['host']}) can listen on none of its addresses ({entry['troubles']}). "
                f"Name the interface that leads to the other ranks: {_NAME_IT}"
            )
        if len({each["host"] for each in entries}) > 1 and not any(map(_leads_here, entry["addresses"])):
            raise HeteroError(
                f"rank {number} ({entry['host']}) has loopback addresses alone ({entry['addresses']}), at which "
                "ranks of other hosts cannot reach it. Name an interface that they can reach "
                f"({_NAME_IT}), or give that host's name an address of its network in /etc/hosts"
            )
    drawn = bytes.fromhex(entries[0]["key"])
    # Under a launcher that gives ranks no key, it is what rank 0 drew: as secret as the collective that carried it.
    all_have_it = bool(job_key) and len({entry["job"] for entry in entries}) == 1
    return Directory(
        key=hmac.new(job_key, drawn, hashlib.sha256).digest() if all_have_it else drawn,
        addresses=tuple(
            tuple(
                (ip, port) for ip, port in entry["addresses"] if entry["host"] == own["host"] or _leads_here((ip, port))
            )
            for entry in entries
        ),
        hosts=tuple(str(entry["host"]) for entry in entries),
    )


def _leads_here(address: Sequence[Any]) -> bool:
    """Return whether the address can lead here from another host."""
    return not ipaddress.ip_address(address[0]).is_loopback
