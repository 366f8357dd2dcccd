"""Elastic jobs on one machine, with a host name for each rank.

Each rank has its own host name, and all of them mean this machine. The job finds its hosts by a script that prints a
file. Adding a line to that file lets a rank join.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

HOSTS = "HVD_HETERO_HOSTS"
"""Environment variable that names the file of hosts to a rank."""

_MOST_ZEROS = 50


@dataclass(frozen=True, slots=True)
class Elastic:
    """Limits within which a launched job may shrink and grow."""

    least: int = 1
    """Ranks below which the job waits for others to join."""
    most: int | None = None
    """Ranks above which the job uses no more hosts; None: four more than at the start, or none with ``spares``."""
    resets: int = 20
    """Changes of the ranks after which the job ends, because an error on all ranks would reset it for ever."""
    spares: int = 0
    """Further hosts, each with a rank that is ready to take the place of a lost one."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the launcher, beside its options."""
        return {"HOROVOD_ELASTIC_SPARES": str(self.spares)} if self.spares else {}

    def options(self, directory: Path, ranks: int) -> list[str]:
        """Write the script and the file of hosts to the directory, and return the options of horovodrun."""
        if self.spares < 0:
            raise ValueError(f"spares must be 0 or more, got {self.spares!r}")
        if not 1 <= self.least <= ranks:
            raise ValueError(f"least must be from 1 to the {ranks} ranks of the start, got {self.least!r}")
        hosts, script = directory / "hosts", directory / "discover_hosts.sh"
        hosts.write_text("".join(f"{host_name(i)}:1\n" for i in range(ranks + self.spares)))
        script.write_text(f"#!/bin/sh\ncat '{hosts}'\n")
        script.chmod(0o755)
        most = self.most or (ranks if self.spares else ranks + 4)
        return [
            "--host-discovery-script", str(script), "--min-np", str(self.least), "--max-np", str(most),
            "--reset-limit", str(self.resets),
        ]  # fmt: skip


def host_name(number: int) -> str:
    """Return the ``number``-th name of this machine; there are some hundred, since a part has 63 characters at most."""
    # Names of their own, because Horovod gives up the whole host of a rank that has failed. Leading zeros make any
    # number of names of 127.0.0.1, and resolving them needs no server.
    last = min(number, _MOST_ZEROS)
    return f"127.0.{'0' * (number - last)}0.{'0' * last}1"


def add_host(hosts: str | os.PathLike[str]) -> str:
    """Let a rank join the job that finds its hosts in this file, and return the new host's name."""
    number = len(Path(hosts).read_text().splitlines())
    name = host_name(number)
    # One short write: a reader finds the whole line or nothing.
    with open(hosts, "a") as file:
        file.write(f"{name}:1\n")
    return name
