"""``hvd-hetero timeline``: a recorded run as a timeline of all ranks, for Perfetto."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_hetero.telemetry import Run

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("run_file", type=Path, metavar="RUN.jsonl", help="telemetry of a recorded run")
    parser.add_argument("out", type=Path, metavar="OUT.json", help="where to write; https://ui.perfetto.dev opens it")
    parser.add_argument("--rounds", metavar="FIRST:END", help='only these rounds, the last one not included: "100:200"')


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from hvd_hetero.telemetry import read_run
    from hvd_hetero.telemetry.exports.trace_events import check_timeline, write_timeline
    from hvd_hetero.telemetry.files import named

    check_timeline(args.out, "OUT.json")
    recorded = read_run(args.run_file)
    if recorded.left_out:
        sys.stderr.write(
            f"{named(args.run_file)}: {recorded.left_out}. The rounds that are recorded follow each other in the "
            "timeline, so that its axis is not the time of the run.\n"
        )
    part = recorded if args.rounds is None else _part(recorded, args.rounds)
    if not len(part.round):
        raise ValueError(f"{named(args.run_file)} holds no such round; its rounds are {_extent(recorded)}")
    events = write_timeline(part, args.out)
    sys.stderr.write(f"timeline: {named(args.out)}, {events} events; open it in https://ui.perfetto.dev\n")
    return 0


def _part(recorded: Run, wanted: str) -> Run:
    found = re.fullmatch(r"(\d*):(\d*)", wanted)
    if found is None:
        raise ValueError(f'--rounds must be two numbers with a colon between, such as "100:200", got {wanted!r}')
    first, end = int(found[1] or 0), int(found[2] or 2**62)
    return recorded.take((recorded.round >= first) & (recorded.round < end))


def _extent(recorded: Run) -> str:
    return f"{recorded.round[0]} to {recorded.round[-1]}" if len(recorded.round) else "none"
