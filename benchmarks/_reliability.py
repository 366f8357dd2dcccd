"""Read the logs of an elastic job's ranks: which rounds counted, and whether they should have.

A membership begins with the round after the last commit. Its rounds count up to the beginning of the next membership;
later ones were lost and are done again.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _reliability_job
import numpy as np
import numpy.typing as npt
from _recoveries import Change, changes


@dataclass(frozen=True)
class Record:
    """The rounds that counted, in order, and what was lost."""

    memberships: list[dict[str, Any]]
    """Each membership, as rank 0 saw it begin."""
    rounds: list[tuple[int, list[int]]]
    """Epoch and samples of all ranks together, for each round."""
    lost: int
    """Samples computed in rounds that did not count."""
    plans: list[list[int]]
    """Samples planned per rank, for each round that counted."""
    recovery_s: list[float]
    """Seconds from the last round of each membership to the beginning of the next one."""
    ranks: list[list[dict[str, Any]]]
    """Beginning of each rank of each membership, in order of rank."""
    ends: list[dict[str, Any]]
    """Outcome of each process that came to the end."""
    changes: list[Change]
    """Changes of the ranks, with the seconds of each recovery."""

    @property
    def needs_s(self) -> list[list[float]]:
        """Return the seconds per sample of each rank in each membership."""
        return [[rank["needs_s"] for rank in ranks] for ranks in self.ranks]

    @property
    def newcomers(self) -> list[list[int]]:
        """Return the ranks of each membership whose process was in no earlier one."""
        known: set[str] = set()
        found = []
        for ranks in self.ranks:
            found.append([rank["rank"] for rank in ranks if rank["process"] not in known])
            known |= {rank["process"] for rank in ranks}
        return found

    def rates(self) -> list[float]:
        """Return the learning rate of each round that counted."""
        return [
            max((m for m in self.memberships if m["begins"] <= r), key=lambda m: m["membership"])["rate"]
            for r in range(len(self.rounds))
        ]

    def visits(self) -> dict[int, list[int]]:
        """Return every visit to a sample, sorted, for each epoch."""
        epochs: dict[int, list[int]] = defaultdict(list)
        for epoch, samples in self.rounds:
            epochs[epoch] += samples
        return {epoch: sorted(samples) for epoch, samples in epochs.items()}


def read(directory: Path) -> Record:
    events = [
        {**json.loads(line), "process": file.stem}
        for file in sorted(directory.glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    begins = sorted(
        (event for event in events if "begins" in event and event["rank"] == 0), key=lambda event: event["membership"]
    )
    assert [each["membership"] for each in begins] == sorted({each["membership"] for each in begins})
    numbers = [each["membership"] for each in begins]
    ends = [each["begins"] for each in begins[1:]] + [max(event["ends"] for event in events if "ends" in event)]
    sizes = {each["membership"]: each["size"] for each in begins}
    counts = {
        number: range(each["begins"], end) for number, each, end in zip(numbers, begins, ends, strict=True)
    }  # fmt: skip
    samples: dict[int, list[int]] = defaultdict(list)
    epochs: dict[int, int] = {}
    lost = 0
    for event in events:
        if "samples" not in event:
            continue
        if event["round"] in counts.get(event["membership"], ()):
            samples[event["round"]] += event["samples"]
            assert epochs.setdefault(event["round"], event["epoch"]) == event["epoch"]
        else:
            lost += len(event["samples"])
    plans = {
        event["finished"]: event["plan"]
        for event in events
        if "finished" in event and event["finished"] in counts.get(event["membership"], ())
    }
    latest = {
        number: max((e["at_s"] for e in events if "finished" in e and e["membership"] == number), default=None)
        for number in numbers
    }
    recovery_s = [
        max(e["at_s"] for e in events if "begins" in e and e["membership"] == then) - latest[now]
        for now, then in itertools.pairwise(numbers)
        if latest[now] is not None
    ]
    return Record(
        memberships=begins,
        rounds=[(epochs[r], samples[r]) for r in sorted(samples)],
        lost=lost,
        plans=[plans[r] for r in sorted(plans)],
        recovery_s=recovery_s,
        ranks=[
            sorted((e for e in events if "begins" in e and e["membership"] == number), key=lambda e: e["rank"])
            for number in numbers
        ],
        ends=[event for event in events if "parameters" in event],
        changes=changes(directory, sizes, events),
    )


def faults_of(record: Record, samples: int, epochs: int) -> str | None:
    """Return what is wrong with the visits, if anything is."""
    visits = record.visits()
    if sorted(visits) != list(range(epochs)):
        return f"epochs {sorted(visits)} were visited, not {epochs}"
    for epoch, visited in visits.items():
        if visited != list(range(samples)):
            missing = sorted(set(range(samples)) - set(visited))
            twice = sorted({i for i in visited if visited.count(i) > 1})
            return f"epoch {epoch}: never visited: {missing}; more than once: {twice}"
    return None


def replayed(
    rounds: Sequence[tuple[int, list[int]]],
    rates: Sequence[float],
    momentum: float,
    samples: int,
    framework: str = "PyTorch",
) -> npt.NDArray[np.float64]:
    """Return the parameters of one process without faults that takes the same samples in the same rounds.

    Least squares by stochastic gradient descent, written out; frameworks differ in where the rate comes in:

        PyTorch:  v <- momentum v + gradient,        p <- p - rate v
        Keras:    v <- momentum v - rate gradient,   p <- p + v
    """
    x, y, parameters = problem(samples, framework)
    velocity = np.zeros_like(parameters)
    for (_, indices), rate in zip(rounds, rates, strict=True):
        gradient = 2 * x[indices].T @ (x[indices] @ parameters - y[indices]) / len(indices)
        if framework == "PyTorch":
            velocity = momentum * velocity + gradient
            parameters = parameters - rate * velocity
        else:
            velocity = momentum * velocity - rate * gradient
            parameters = parameters + velocity
    return parameters


def loss(parameters: npt.ArrayLike, samples: int, framework: str = "PyTorch") -> float:
    """Return the mean squared error."""
    x, y, _ = problem(samples, framework)
    return float(np.mean((x @ np.asarray(parameters) - y) ** 2))


@functools.cache
def problem(samples: int, framework: str) -> tuple[npt.NDArray[np.float64], ...]:
    """Return features with a column of ones, targets, and the parameters at the beginning.

    PyTorch draws these from the generator that all threads share, so judges that are threads ask for them beforehand.
    """
    if framework == "Keras":
        features, targets = _reliability_job.line(samples)
        begins = np.zeros(features.shape[1] + 1)
    else:
        import _reliability_rank

        features, targets = (tensor.numpy() for tensor in _reliability_rank.data(samples))
        begins = np.concatenate([p.detach().numpy().ravel() for p in _reliability_rank.network().parameters()])
    return np.hstack([features, np.ones((samples, 1))]), targets[:, 0], begins
