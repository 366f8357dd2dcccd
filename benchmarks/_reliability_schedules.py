"""The jobs of `benchmarks/reliability.py`, each drawn by its number: ranks, training, and faults in chosen rounds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SAMPLES, EPOCHS, GLOBAL_BATCH = 150, 4, 24
FIRST, LAST = 2, 14  # rounds in which faults happen: all jobs have more, and a last commit may come before
EXACT = ("bsp", "static", "lb-bsp", "self-adaptive", "non-blocking", "lb-non-blocking", "elastic-bsp")
# What is compared there are losses, which must have converged: more epochs and less momentum.
CONVERGES = {"epochs": 30, "momentum": 1 / 2, "rate": 1 / 16}  # floats that Keras sends through float32 unchanged
CONVERGING: dict[str, dict[str, Any]] = {
    "elastic-bsp, local": CONVERGES,
    "non-blocking, d-psgd": {"policy": "non-blocking", "sync": "d-psgd", **CONVERGES},
    "lb-bsp, matcha": {"policy": "lb-bsp", "sync": "matcha", **CONVERGES},
}
LOADERS: dict[str, dict[str, Any]] = {
    "lb-bsp, 2 workers": {"policy": "lb-bsp", "num_workers": 2},
    "lb-bsp, stream": {"policy": "lb-bsp", "stream": "whole"},
}
TRAININGS = [("PyTorch", name) for name in (*EXACT, *LOADERS, *CONVERGING)]
TRAININGS += [("Keras", name) for name in (*EXACT, *CONVERGING)]
KINDS = ("kill", "join", "freeze", "slow", "report", "cut", "gone", "spare")
SPARE_LOST = 0.3  # of the jobs with one: as it takes a lost rank's place, while the others meet it
COMMITS_BY_TIME = 0.25  # of all jobs: as often as 1 % of the time pays for
FOR_GOOD_S = 1000.0  # longer than a job: the rank is given up
LIES = [float("nan"), float("inf"), 0.0, -1.0, 1e6]


@dataclass(frozen=True)
class Schedule:
    """One job, and what happens in it."""

    number: int
    framework: str
    name: str
    """Name of the training in the table."""
    ranks: int
    spares: int
    left: int
    """Least number of ranks at the end."""
    job: dict[str, Any]
    """Job description for the ranks, without the directory."""
    cuts: list[tuple[int, int, float]]
    """Host, round and seconds of each cut of a link; with any, the hosts are network namespaces."""

    @property
    def exact(self) -> bool:
        """True if the parameters equal one process's."""
        return self.name not in CONVERGING


def schedule(number: int, links: bool = True) -> Schedule:
    """Return the job of that number; ``links``: whether there may be hosts with links that are cut."""
    chance = random.Random(number)
    framework, name = TRAININGS[number % len(TRAININGS)]
    ranks, kind = chance.choice([2, 3, 4]), chance.random()
    network, spares = kind < 0.15, int(kind > 0.65)  # a network of hosts, which are few and fixed; or a spare
    kinds = ["kill", "kill", "freeze", "slow", "report", "join"]
    if network:
        kinds = ["kill", "freeze", "slow", "report", "cut", "cut", "cut"]
    if spares:
        kinds.remove("join")  # a new host would be one for a spare
    left, faults, cuts = ranks, [], []
    gone = chance.random() < (0.3 if network else 0.05)  # one of them, for good: frozen, or its host cut off
    if network and gone:
        kinds.remove("kill")  # else it might have been the last one
    for at in sorted(chance.choices(range(FIRST, LAST), k=chance.randint(1, 4))):
        what = chance.choice(kinds)
        if what == "kill" and left == 1:
            what = "slow"
        if what == "join":  # when it takes part is for the next commit to say, so no later fault counts on it
            faults.append(["join", {"at": at}])
        elif what == "cut":
            cuts.append((chance.randrange(ranks), at, chance.uniform(0.5, 4.0)))
        else:
            left -= what == "kill"
            faults.append([what, _options(what, chance, left + (what == "kill"), at)])
    if gone and left > 1:
        if network:
            cuts.append((chance.randrange(1, ranks), LAST, FOR_GOOD_S))  # not the first host, where the launcher is
        else:
            faults.append(["freeze", {"rank": chance.randrange(left), "at": LAST, "seconds": FOR_GOOD_S}])
        left -= 1
    job = {
        "policy": name, "samples": SAMPLES, "epochs": EPOCHS, "global_batch": GLOBAL_BATCH, "spares": spares,
        "rounds_per_commit": chance.choice([1, 2, 3, 7]), "faults": faults,
        "seconds_per_sample": chance.sample([1.0, 2.0, 3.0, 5.0], k=4), "rate": 1 / 64, "momentum": 7 / 8,
    }  # fmt: skip
    job |= {**LOADERS, **CONVERGING}.get(name, {})
    other = random.Random(-1 - number)  # other chances, for all else to be as it was
    if other.random() < SPARE_LOST and spares:
        job["spare_is_lost"] = True
    if other.random() < COMMITS_BY_TIME:
        job["rounds_per_commit"] = "auto"
    return Schedule(number, framework, name, ranks, spares, left, job, cuts if links else [])


def _options(what: str, chance: random.Random, ranks: int, at: int) -> dict[str, Any]:
    drawn: dict[str, Callable[[], dict[str, Any]]] = {
        "kill": lambda: {"late": chance.random() < 0.5},
        "freeze": lambda: {"seconds": 0.5},
        "slow": lambda: {"factor": chance.choice([2, 5])},
        "report": lambda: {"value": chance.choice(LIES), "rounds": chance.randint(1, 5)},
    }
    return {"rank": chance.randrange(ranks), "at": at, **drawn[what]()}
