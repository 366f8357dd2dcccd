"""Faults in chosen rounds: ranks become slow, die, freeze, report a false speed, or join.

    faults = Faults().slow(rank=1, at=20, factor=3).kill(rank=2, at=30).join(at=40)
    balance = LoadBalance(…)
    faults.attach(balance)                                 # again after every reset

Rounds count as ``balance.rounds``. Each fault strikes once in a job, although a reset repeats rounds and renumbers
ranks: files in a directory that all ranks see mark the faults that have struck. A false report is sent as often as its
rounds are done.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hvd_hetero.testing.hosts import HOSTS, add_host
from hvd_hetero.testing.rank import RUN_DIR

_POLL_S = 0.02
_LONGEST_NEWS_S = 20.0  # until a rank hears of a new host; Horovod looks once a second, and the others wait


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned fault."""

    kind: Literal["slow", "kill", "freeze", "report", "join"]
    rank: int
    at: int
    """Round in which it strikes."""
    value: float = 0.0
    """Factor of a slow-down, seconds of a freeze, or speed of a report."""
    rounds: int = 1
    """Number of rounds of a report."""
    late: bool = False
    """True if a kill strikes once gradients are computed and some are on the way, not when the round begins."""
    number: int = 0
    """Number among the planned faults."""


class Faults:
    """The faults of a job, planned alike on all ranks.

    Parameters
    ----------
    directory
        Directory for the marks of faults, the same on all ranks, empty when the job begins. None: the run directory of
        ``hvd_hetero.testing.launch``.
    clock, sleep
        Functions of seconds, to run in simulated time.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.planned: list[Fault] = []
        self._directory = directory
        self._clock = clock or time.perf_counter
        self._sleep = sleep or time.sleep
        self._simulated = sleep is not None
        self._factor = 1.0  # of this process, even if its rank changes
        self._balancer: Any = None
        self._state: Any = None
        self._began_s = 0.0

    def slow(self, rank: int, at: int, factor: float) -> Faults:
        """Make the process of this rank compute ``factor`` times as long from that round on; 1 ends the slow-down."""
        if not factor >= 1:
            raise ValueError(f"factor must be 1 or more, as nothing can be made faster, got {factor!r}")
        return self._plan(Fault("slow", rank, at, factor))

    def kill(self, rank: int, at: int, *, late: bool = False) -> Faults:
        """Send ``kill -9`` when the round begins, or (``late``) once gradients are computed and some are on the way."""
        return self._plan(Fault("kill", rank, at, late=late))

    def freeze(self, rank: int, at: int, seconds: float) -> Faults:
        """Stop the whole process, with all its threads, for ``seconds`` (SIGSTOP, SIGCONT)."""
        if not seconds > 0:
            raise ValueError(f"seconds must be positive, got {seconds!r}")
        return self._plan(Fault("freeze", rank, at, seconds))

    def report(self, rank: int, at: int, value: float, *, rounds: int = 1) -> Faults:
        """Report ``value`` as the rank's expected speed, for ``rounds``: NaN, infinity, anything."""
        return self._plan(Fault("report", rank, at, value, rounds=rounds))

    def join(self, at: int) -> Faults:
        """Add a host, from rank 0. The next commit lets all ranks know."""
        return self._plan(Fault("join", 0, at))

    def attach(self, balance: Any, state: Any = None) -> None:
        """Make the faults strike in the rounds of this ``LoadBalance``.

        With the ``TorchState`` or ``KerasState``, a join waits until this job has heard of the new host, so that the
        next commit lets it in.
        """
        from hvd_hetero.session import balancer_of  # which takes more to import than the launcher of a job needs

        self._balancer = balancer_of(balance)
        self._state = state
        meter = self._balancer.meter
        begin, done, row = meter.begin, meter.done, meter.row

        def begins(input_s: float) -> None:
            begin(input_s)
            self._began_s = self._clock()
            if not meter.round.micro_batches:
                self._strike()

        def is_done(*arguments: Any) -> None:
            self._strike_late()
            if self._factor > 1:
                self._sleep((self._factor - 1) * (self._clock() - self._began_s))
            done(*arguments)

        def reported() -> dict[str, float]:
            return {**row(), **self._lie()}

        # The methods are replaced on the object, so that training needs no hook for tests and pays for none.
        for name, method in (("begin", begins), ("done", is_done), ("row", reported)):
            setattr(meter, name, method)

    def happened(self) -> list[Fault]:
        """Return the faults that have struck so far, on any rank."""
        return [fault for number, fault in enumerate(self.planned) if (self._marks / f"fault.{number}").exists()]

    def _plan(self, fault: Fault) -> Faults:
        if fault.rank < 0 or fault.at < 0 or fault.rounds < 1:
            raise ValueError(f"rank and at count from 0, and rounds from 1, got {fault}")
        self.planned.append(replace(fault, number=len(self.planned)))
        return self

    def _strike(self) -> None:
        for fault in self._due("slow", "freeze", "join", "kill"):
            if fault.late:
                continue
            getattr(self, f"_{fault.kind}_now")(fault)

    def _strike_late(self) -> None:
        for fault in self._due("kill"):
            self._kill_now(fault)

    def _due(self, *kinds: str) -> list[Fault]:
        balancer = self._balancer
        return [
            fault
            for fault in self.planned
            if fault.kind in kinds and fault.rank == balancer.rank and fault.at == balancer.rounds
        ]

    def _first(self, fault: Fault) -> bool:
        """Return True if this fault has not struck before, and mark it."""
        try:
            with open(self._marks / f"fault.{fault.number}", "x") as mark:
                mark.write(f"{time.time()} {os.getpid()} {fault.kind}\n")
        except FileExistsError:
            return False
        return True

    @property
    def _marks(self) -> Path:
        directory = self._directory or os.environ.get(RUN_DIR)
        if directory is None:
            raise ValueError(
                "directory must be given if hvd_hetero.testing.launch has not started this job: an empty one that all "
                "ranks see, for the marks of faults"
            )
        return Path(directory)

    def _slow_now(self, fault: Fault) -> None:
        if self._first(fault):
            self._factor = fault.value

    def _kill_now(self, fault: Fault) -> None:
        if self._first(fault):
            os.kill(os.getpid(), signal.SIGKILL)

    def _freeze_now(self, fault: Fault) -> None:
        if not self._first(fault):
            return
        # Another process sends both signals in this order. If this one stopped itself, the wake-up could come first,
        # and it would sleep for ever.
        me = os.getpid()
        subprocess.run(["sh", "-c", f"kill -STOP {me}; sleep {fault.value}; kill -CONT {me}"], check=True)
        if self._simulated:
            self._sleep(fault.value)

    def _join_now(self, fault: Fault) -> None:
        if not self._first(fault):
            return
        hosts = os.environ.get(HOSTS)
        if hosts is None:
            raise ValueError(f"join needs the file of hosts that {HOSTS} names; launch the job with elastic=Elastic()")
        add_host(hosts)
        deadline_s = time.monotonic() + _LONGEST_NEWS_S
        while self._state is not None and not self._state.hosts_have_changed and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def _lie(self) -> dict[str, float]:
        balancer = self._balancer
        for fault in self.planned:
            now = fault.at <= balancer.rounds < fault.at + fault.rounds
            if fault.kind == "report" and fault.rank == balancer.rank and now:
                return {"samples_per_s": fault.value}
        return {}
