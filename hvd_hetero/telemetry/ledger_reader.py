"""Read the ledger of a run: its micro-batches one after the other, as one process trains on them again."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvd_hetero.telemetry.files import named, open_file
from hvd_hetero.telemetry.reader import header_of, object_of
from hvd_hetero.telemetry.records import SCHEMA, VERSION

KEY = "ledger"  # of the samples of each micro-batch of each rank


class LedgerPart(NamedTuple):
    """One micro-batch that some rank has done."""

    round: int
    epoch: int
    rank: int
    number: int
    """Its place among the micro-batches of its rank in the round."""
    indices: list[int]
    """Its samples, as places in the dataset."""
    total: float
    """What the round's gradient is a mean over: its samples, or what they counted instead, such as tokens."""
    last: bool
    """True: the update follows."""

    @property
    def share(self) -> float:
        """The weight of its mean gradient in the round's, where samples count."""
        return len(self.indices) / self.total

    @property
    def seed(self) -> int:
        """The seed with which the rank began the micro-batch."""
        return micro_batch_seed(self.round, self.rank, self.number)


def micro_batch_seed(round: int, rank: int, number: int) -> int:
    """Return the seed of the random numbers in a micro-batch, a rank's ``number``-th of a round."""
    return int(np.random.SeedSequence([round, rank, number]).generate_state(1)[0])


def seed_generators(seed: int) -> None:
    """Seed what a loop's body draws random numbers from: Python, NumPy, and PyTorch if it is imported."""
    random.seed(seed)
    np.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def read_ledger(*paths: str | Path, first: int = 0) -> Iterator[LedgerPart]:
    """Return what counts of a run, in order: rounds that were done again by a later entry are left out.

    ``paths``: the files of the run, the oldest first. Each membership, and each job that resumed, has begun another.
    ``first``: the round to begin with, whose parameters a checkpoint has.
    """
    rounds = [(entry["round"], entry["epoch"]) for entry in _entries(paths)]
    if len({epoch for round, epoch in rounds if round == 0}) > 1:
        raise ValueError(
            "the ledger has round 0 in several epochs, since a job has resumed without the state of its LoadBalance; "
            "replay its file alone, from the checkpoint that it began with"
        )
    counts, least = [], math.inf
    for round, _ in reversed(rounds):
        if round < least - 1 < math.inf:
            raise ValueError(
                f"the ledger has no round {round + 1}, and goes on with {least}; give all files of the run, "
                "the oldest first"
            )
        counts.append(first <= round < least)
        least = min(least, round)
    if not (rounds and least <= first <= rounds[-1][0]):
        held = f"rounds {least} to {rounds[-1][0]} alone" if rounds else "no round"
        raise ValueError(
            f"the ledger has no round {first} to begin with: {', '.join(map(named, paths)) or 'no file'} holds {held}; "
            "name the run's earlier files first, or begin after a checkpoint, by --from-round (first=… of read_ledger)"
        )
    return _parts(paths, counts)


def _parts(paths: Sequence[str | Path], counts: list[bool]) -> Iterator[LedgerPart]:
    for entry in _entries(paths):
        if not counts.pop():
            continue
        each = [(rank, *part) for rank, parts in enumerate(entry[KEY]) for part in enumerate(parts)]
        for at, (rank, number, indices) in enumerate(each, start=1):
            yield LedgerPart(entry["round"], entry["epoch"], rank, number, indices, entry["total"], at == len(each))


def _entries(paths: Sequence[str | Path]) -> Iterator[dict[str, Any]]:
    before = ""
    for path in map(Path, paths):
        recorded = found = False
        with open_file(path) as file:
            began = header_of(file.readline(), named(path), SCHEMA, VERSION).get("began", "")
            if before and began <= before:
                raise ValueError(
                    f"{named(path)} was begun no later than the file named before it; name each file once, the oldest "
                    "first"
                )
            before = began
            for at, line in enumerate(file, start=2):
                recorded = True
                # Cheaper than parsing the lines of rounds; a last line cut short has no end.
                if f'"{KEY}":'.encode() in line and line.endswith(b"\n"):
                    found = True
                    yield object_of(line, f"{named(path)}, line {at}")
        if recorded and not found:  # a membership may end before its first round
            raise ValueError(f"{named(path)} holds no ledger; record the run with Telemetry(path, ledger=True)")
