"""``hvd-hetero check``: whether this installation can train, and which command repairs what is wrong."""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hvd_hetero.tools.cli.output import status

if TYPE_CHECKING:
    from hvd_hetero.tools.cli.findings import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks on this machine (%(default)s)")
    parser.add_argument("--no-launch", action="store_true", help="do not launch two ranks that sum a vector")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="for those two ranks (%(default)g seconds)"
    )


def run(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> int:
    """Run the command: exit code 0 if nothing failed, 1 otherwise. Warnings do not count."""
    if args.ranks < 1:
        raise ValueError(f"--ranks must be at least 1, got {args.ranks}; give the ranks that one machine will have")
    if not 0 < args.timeout < math.inf:
        raise ValueError(f"--timeout must be positive and finite, got {args.timeout:g}; leave it out")
    found = []
    with status("checking") as tell:
        for finding in _findings(args, environ):
            found.append(finding)
            tell(f"checked: {finding.name}")
    write(found)
    return 1 if any(finding.verdict == "failure" for finding in found) else 0


def _findings(args: argparse.Namespace, environ: Mapping[str, str]) -> Iterator[Finding]:
    from hvd_hetero.tools.cli import findings, installed

    frameworks, built = installed.frameworks(environ), installed.read_horovod()
    mine = findings.horovod(built, frameworks)
    yield findings.python(sys.version_info[:3])
    yield findings.tools(installed.missing_tools(environ), needed=mine.verdict == "failure")
    yield findings.frameworks(frameworks)
    yield mine
    if built.version is not None:
        yield findings.horovod_operations(built, installed.gpus())
        yield findings.horovod_patches(built)
    keras = frameworks | installed.versions("keras", "tf_keras")
    yield findings.keras(keras, environ, installed.keras_backend(environ))
    machine, quota = len(os.sched_getaffinity(0)), installed.cpu_quota()
    yield findings.container(quota, machine, *installed.memory_limit(), args.ranks)
    usable = max(math.floor(min(machine, quota)), 1)
    yield findings.cores(usable, args.ranks)
    yield findings.threads(environ.get("OMP_NUM_THREADS", ""), usable, args.ranks)
    yield findings.allocator(environ, platform.libc_ver()[0])
    if args.no_launch or mine.verdict == "failure":
        return
    launched = [framework for framework in frameworks if framework in built.built_for]
    for framework in launched if built.version is not None else ["torch.distributed"]:
        yield findings.two_ranks(framework, args.timeout)


def write(found: Sequence[Finding]) -> None:
    """Print a line for each finding, and the commands that repair what is wrong."""
    for finding in found:
        sys.stdout.write(f"{finding.verdict:<8} {finding.name}: {finding.text}\n")
        if finding.command:
            sys.stdout.write(f"{'':<8} repair it by: {finding.command}\n")
    sys.stdout.write(f"{_summary(found)}\n")


def _summary(found: Sequence[Finding]) -> str:
    counts = {verdict: sum(finding.verdict == verdict for finding in found) for verdict in ("failure", "warning")}
    failures, warnings = (f"{count} {verdict}{'' if count == 1 else 's'}" for verdict, count in counts.items())
    if counts["failure"]:
        return f"This installation cannot train: {failures}, {warnings}."
    return f"This installation can train: {warnings}."
