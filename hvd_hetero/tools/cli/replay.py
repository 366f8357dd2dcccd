"""``hvd-hetero replay``: train again in one process, micro-batch by micro-batch, as a run's ledger says."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_hetero.telemetry.ledger_reader import LedgerPart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("run_files", nargs="+", type=Path, metavar="RUN.jsonl", help="with a ledger, the oldest first")
    text = "begin with this round, from a checkpoint of yours (%(default)s)"
    parser.add_argument("--from-round", type=int, default=0, metavar="N", help=text)
    parser.add_argument("function", metavar="TRAIN.py:FUNCTION", help="what trains on the micro-batches it is given")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from hvd_hetero.telemetry.ledger_reader import read_ledger

    file, _, name = args.function.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"FUNCTION must be TRAIN.py:FUNCTION, of a file that is there, got {args.function!r}")
    sys.path.insert(0, str(Path(file).resolve().parent))  # as Python does for a script
    function = runpy.run_path(file).get(name)
    if not callable(function):
        raise ValueError(f"{file} has no function {name!r}; name one that takes the micro-batches of a ledger")
    parts = read_ledger(*args.run_files, first=args.from_round)
    # What fails from here on fails in the reader's own code.
    args.traceback = True
    result = function(_seeded(parts))
    if result is not None:
        sys.stdout.write(f"{result}\n")
    return 0


def _seeded(parts: Iterator[LedgerPart]) -> Iterator[LedgerPart]:
    """Yield micro-batches, each with the random numbers of its rank; say how many there were."""
    from hvd_hetero.telemetry.ledger_reader import seed_generators

    rounds = samples = 0
    for part in parts:
        seed_generators(part.seed)
        yield part
        rounds, samples = rounds + part.last, samples + len(part.indices)
    sys.stdout.write(f"{rounds} rounds, {samples} samples\n")
