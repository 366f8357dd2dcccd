"""Where a training is in its rounds, and since when it stands still."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence

from hvd_hetero.balancer import Balancer
from hvd_hetero.watchdog.whereabouts import Whereabouts, locate

_trainings: list[weakref.ref[Balancer]] = []  # a rank makes progress if any of its trainings does
_trainings_lock = threading.Lock()


def register_training(balancer: Balancer) -> None:
    """Note one more training of this process."""
    with _trainings_lock:
        _trainings[:] = [*(known for known in _trainings if known() is not None), weakref.ref(balancer)]


def _rounds_and_micro_batches() -> int:
    with _trainings_lock:
        alive = [balancer for known in _trainings if (balancer := known()) is not None]
    return sum(each.rounds + each.meter.round.micro_batches for each in alive)


class Progress:
    """Follow the rounds of one training, and read its thread's stack on request, so that training pays nothing.

    ``waits_in`` holds beginnings of names of modules that wait for other ranks, ``waits_at_the_end_in`` those that do
    so while a round's sums are under way. After ``stopped_s`` without a look, this process itself was stopped.
    """

    def __init__(
        self, balancer: Balancer, waits_in: Sequence[str], waits_at_the_end_in: Sequence[str], stopped_s: float
    ) -> None:
        self._balancer = weakref.ref(balancer)
        self.rank = balancer.rank
        self.thread = threading.get_ident()
        """The thread that trains."""
        self.joins = False
        """Whether that thread waits for all ranks outside of a round, as at the end of an evaluation."""
        self._waits_in = tuple(waits_in)
        self._waits_at_the_end_in = (*self._waits_in, *waits_at_the_end_in)
        self._stopped_s = stopped_s
        self._mark: tuple[object, ...] = ()  # progress at the last look
        self._found: tuple[object, ...] | None = None  # where this rank is since then; None: not looked yet
        self.since = self._looked_at = time.monotonic()
        """The time since when this rank is where it is."""

    @property
    def training(self) -> Balancer | None:
        """The training, unless it is gone."""
        return self._balancer()

    def where(self) -> Whereabouts:
        """Return where this rank is now, and note since when."""
        balancer = self._balancer()
        if balancer is None:
            waits, _, where = locate(self.thread, self._waits_in)
            stage, rounds = "over", -1
        else:
            ends, rounds = balancer.synchronising, balancer.rounds
            waits, of_its_own, where = locate(self.thread, self._waits_at_the_end_in if ends else self._waits_in)
            waits = waits or balancer.meter.reads  # in a thread of autograd, perhaps
            at_end = ends and waits and not of_its_own
            between = "joins" if self.joins else "body" if balancer.in_round else "between"
            stage = f"{rounds} {'end' if at_end else between}"
        self.has_progressed(balancer)
        found = (stage, waits, where)
        if self._found not in (None, found):
            self.since = time.monotonic()
        self._found = found
        return Whereabouts(self.rank, rounds, stage, waits, where, time.monotonic() - self.since)

    def standstill(self, balancer: Balancer) -> Whereabouts | None:
        """Return where this rank is, if it stands still in a round or joins; None if there is nothing to wait for."""
        waits = balancer.in_round or self.joins
        return None if self.has_progressed(balancer) or not waits else self.where()

    def has_progressed(self, balancer: Balancer | None) -> bool:
        """Return whether training has gone on since the last look; if so, waiting begins now at the earliest."""
        now = time.monotonic()
        mark = (_rounds_and_micro_batches(), self.joins, balancer and (balancer.in_round, balancer.synchronising))
        # A long time without a look means that this process was stopped, with or without the others.
        goes_on = mark != self._mark or now - self._looked_at > self._stopped_s
        self._mark, self._looked_at = mark, now
        if goes_on:
            self._found, self.since = None, now
        return goes_on
