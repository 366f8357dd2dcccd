"""Elastic jobs on one machine: every rank on a host of its own, by name.

Horovod gives up the whole host of a rank that has failed. So each rank here has a host name to itself, all of which
mean this machine: leading zeros make 127.0.0.1 as many names as are wanted, and resolving them asks no server. The job
finds its hosts by a script that prints a file; whoever adds a line to that file lets a rank join.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HOSTS", "Elastic", "add_host", "host_name"]

HOSTS = "HVD_HETERO_HOSTS"
"""names, in the environment of a rank, the file of hosts"""


@dataclass(frozen=True, slots=True)
class Elastic:
    """How a launched job may shrink and grow."""

    least: int = 1
    """ranks below which the job waits for others to come"""
    most: int | None = None
    """ranks above which hosts are not used; None: as many as at the start, and four more"""
    resets: int = 20
    """after so many changes of the ranks the job is ended: endless ones are what an error on all ranks looks like"""

    def options(self, directory: Path, ranks: int) -> list[str]:
        """For horovodrun, once the script and the file of hosts are in the directory."""
        if not 1 <= self.least <= ranks:
            raise ValueError(f"least must be from 1 to the {ranks} ranks of the start, got {self.least!r}")
        hosts, script = directory / "hosts", directory / "discover_hosts.sh"
        hosts.write_text("".join(f"{host_name(i)}:1\n" for i in range(ranks)))
        script.write_text(f"#!/bin/sh\ncat '{hosts}'\n")
        script.chmod(0o755)
        most = ranks + 4 if self.most is None else self.most
        return [
            "--host-discovery-script", str(script), "--min-np", str(self.least), "--max-np", str(most),
            "--reset-limit", str(self.resets),
        ]  # fmt: skip


def host_name(number: int) -> str:
    """The ``number``-th name of this machine."""
    return f"127.0.0.{'0' * number}1"


def add_host(hosts: str | os.PathLike[str]) -> str:
    """Let a rank join the job that finds its hosts in this file. Returns the new host's name."""
    number = len(Path(hosts).read_text().splitlines())
    name = host_name(number)
    with open(hosts, "a") as file:  # one short write: who reads meanwhile finds the line whole, or not at all
        file.write(f"{name}:1\n")
    return name
