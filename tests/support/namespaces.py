"""Several hosts on one machine: network namespaces with an address, a name, and a link that can be slow or cut.

    with Hosts(2, delay_s=0.005, rate_bit_s=100e6) as hosts:
        launch("train.py", 2, starter=hosts.torchrun())
        launch("train.py", 2, starter=hosts.horovodrun())

The hosts share the machine's files, processors and processes. Each has a network of its own: loopback, and one
interface that leads to the other hosts through a switch (`support.switch`). The machine's own network is not
reached from there, and does not reach them. It needs root on Linux, TUN devices, ``ip`` and ``nsenter``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hvd_hetero.testing import rank
from support import everywhere, switch

_ANSWERS_WITHIN_S = 20.0
_MOST = 200  # addresses of the network
_SSH = """#!/bin/sh
# In the place of ssh: runs a command on a host of this machine. Options, before and after the host, are left aside.
host=
while :; do
  case "$1" in
    -o|-p|-i) shift 2 ;;
    -*) shift ;;
    *) [ -n "$host" ] && break; host="$1"; shift ;;
  esac
done
case "$host" in
{cases}
  *) echo "ssh: there is no host $host here" >&2; exit 255 ;;
esac
"""


class HostsUnavailableError(OSError):
    """Hosts cannot be made here; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class HostsSupport:
    """Answer to whether hosts can be made here; usable in an ``if``."""

    available: bool
    """True if hosts can be made."""
    why: str
    """How they are made, or the obstacle."""

    def __bool__(self) -> bool:
        return self.available


def hosts_available() -> HostsSupport:
    """Try to make a host, because permissions do not tell (containers may refuse namespaces, mounts or devices)."""
    try:
        Hosts(1).close()
    except HostsUnavailableError as error:
        return HostsSupport(False, str(error))
    return HostsSupport(True, "network namespaces and TUN devices")


class Hosts:
    """Hosts named ``host0``, ``host1``, … that reach each other over links; a context manager.

    A link joins each host to a switch. ``delay_s`` is how long a packet takes from the host to any other one, so the
    round trip is twice that; ``rate_bit_s`` limits each direction of each link. Change them by `link`. ``mtu`` is
    the largest packet in bytes: large ones cost the machine less, as it carries each by hand.

    Closing ends what still runs on the hosts. If this process is killed, the hosts and what runs there end, too.
    """

    interface = switch.INTERFACE
    """Name of the interface by which a host reaches the others, the same on all."""

    def __init__(
        self,
        count: int = 2,
        *,
        delay_s: float = 0.0,
        rate_bit_s: float = math.inf,
        mtu: int = 9000,
    ) -> None:
        if not 1 <= count <= _MOST:
            raise ValueError(f"count must be from 1 to {_MOST} hosts, got {count!r}")
        if not 1280 <= mtu <= 65535:
            raise ValueError(f"mtu must be from 1280 to 65535 bytes, got {mtu!r}")
        properties = _checked(delay_s=delay_s, rate_bit_s=rate_bit_s)
        if why := _missing():
            raise HostsUnavailableError(why)
        self.names = tuple(f"host{number}" for number in range(count))
        self.addresses = tuple(map(switch.address, range(count)))
        self._directory = Path(tempfile.mkdtemp(prefix="hvd-hetero-hosts-"))
        self._switch = subprocess.Popen(
            [sys.executable, "-S", switch.__file__, str(self._directory), str(mtu), *self.names],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,  # a Ctrl-C is for this process, which then ends the switch
        )  # fmt: skip
        try:
            self._paths: list[dict[str, str]] = json.loads(self._answer())
            for number in range(count):
                self._order(number, **properties)
        except BaseException:
            self.close()
            raise

    def on(self, host: int) -> list[str]:
        """Return the prefix that runs a command on a host, counted from 0: ``[*hosts.on(1), "python", "serve.py"]``."""
        if not 0 <= host < len(self.names):
            raise ValueError(f"host must be from 0 to {len(self.names) - 1}, got {host!r}")
        kinds = {"net": "net", "uts": "uts", "mnt": "mount"}  # as nsenter calls them
        inside = [f"--{option}={self._paths[host][kind]}" for kind, option in kinds.items()]
        return [shutil.which("nsenter") or "nsenter", *inside, f"--wd={os.getcwd()}", "--"]

    def link(self, host: int, **properties: float) -> None:
        """Change ``delay_s`` or ``rate_bit_s`` of a host's link, from the next packet on."""
        self._order(host, **_checked(**properties))

    def cut(self, host: int) -> None:
        """Cut the link of a host: packets from it and to it are lost, also those on their way."""
        self._order(host, cut=True)

    def mend(self, host: int) -> None:
        """Mend a link that was cut. Connections go on when they next send again, which TCP does ever more seldom."""
        self._order(host, cut=False)

    def torchrun(self, per_host: int = 1, *, options: Sequence[str] = (), python: str = sys.executable) -> list[str]:
        """Return a ``starter`` for `launch`: torchrun on each host, with as many ranks there."""
        torchrun = [
            python, rank.__file__, rank.AGENT, "-m", "torch.distributed.run", "--nnodes", str(len(self.names)),
            "--nproc-per-node", str(per_host), "--master-addr", self.names[0], "--no-python", *options,
        ]  # fmt: skip
        prefixes = json.dumps([self.on(host) for host in range(len(self.names))])
        # torchrun takes its options from PET_… variables, too: the number of the node differs between hosts.
        settings = [f"GLOO_SOCKET_IFNAME={self.interface}", f"NCCL_SOCKET_IFNAME={self.interface}"]
        return ["/usr/bin/env", *settings, python, everywhere.__file__, prefixes, "PET_NODE_RANK", *torchrun]

    def horovodrun(self, per_host: int = 1, *, options: Sequence[str] = (), python: str = sys.executable) -> list[str]:
        """Return a ``starter`` for `launch`: horovodrun on the first host, with as many ranks on each.

        Horovod reaches the other hosts by ``ssh``. Here a script of that name enters their namespaces.
        """
        from hvd_hetero.testing.launch import horovodrun_of

        cases = [f'  {name}) exec {shlex.join(self.on(n))} sh -c "$*" ;;' for n, name in enumerate(self.names)]
        ssh = self._directory / "ssh"
        ssh.write_text(_SSH.replace("{cases}", "\n".join(cases)))
        ssh.chmod(0o755)
        path = f"PATH={self._directory}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        hosts = ",".join(f"{name}:{per_host}" for name in self.names)
        return [
            *self.on(0), "/usr/bin/env", path, python, rank.__file__, "--exec", horovodrun_of(python),
            "-np", str(per_host * len(self.names)), "--gloo", "-H", hosts, "--network-interface", self.interface,
            *options,
        ]  # fmt: skip

    def close(self) -> None:
        """End what runs on the hosts, and remove them."""
        for pipe in (self._switch.stdin, self._switch.stdout, self._switch.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):  # it has ended, with something unread
                pipe.close()
        try:
            self._switch.wait(_ANSWERS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._switch.kill()
            self._switch.wait()
        shutil.rmtree(self._directory, ignore_errors=True)  # if the switch has not come to it

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _order(self, host: int, **what: Any) -> None:
        if not 0 <= host < len(self.names):
            raise ValueError(f"host must be from 0 to {len(self.names) - 1}, got {host!r}")
        assert self._switch.stdin is not None
        try:
            self._switch.stdin.write(json.dumps({"host": host, **what}) + "\n")
            self._switch.stdin.flush()
        except (BrokenPipeError, ValueError) as error:  # a pipe that was closed is a ValueError
            raise HostsUnavailableError("the switch between the hosts has ended; make new hosts") from error
        self._answer()

    def _answer(self) -> str:
        """Return a line of the switch."""
        assert self._switch.stdout is not None
        assert self._switch.stderr is not None
        ready, _, _ = select.select([self._switch.stdout], [], [], _ANSWERS_WITHIN_S)
        line = self._switch.stdout.readline() if ready else ""
        if not line and self._switch.poll() is None and not ready:
            raise HostsUnavailableError(f"the switch between the hosts does not answer within {_ANSWERS_WITHIN_S:g} s")
        if not line:
            raise HostsUnavailableError(
                f"hosts cannot be made here ({self._switch.stderr.read().strip()}); run as root, and in a container "
                "with --privileged"
            )
        return line


def _missing() -> str:
    """Return what hosts need and this machine lacks, or nothing."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "hosts need root on Linux, for their network namespaces; run as root, or in a privileged container"
    if lacks := [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]:
        return f"hosts need the programs {' and '.join(lacks)}; install iproute2 and util-linux"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "hosts need /dev/net/tun; load the kernel module tun, and give the device to the container"
    return ""


def _checked(**properties: float) -> dict[str, float]:
    """Return the properties of a link, if they can be."""
    for name, value in properties.items():
        if not {"delay_s": value >= 0, "rate_bit_s": value > 0}.get(name, False):
            raise ValueError(f"a link has delay_s, of at least 0, and rate_bit_s, above 0; got {name}={value!r}")
    return properties
