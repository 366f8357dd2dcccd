"""A thread that checks whether this rank makes progress, and asks the others if it does not."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Container, Sequence

from hvd_hetero.balancer import Balancer
from hvd_hetero.communication.addresses import gather_directory, job_key, listen
from hvd_hetero.communication.side_channel import Kind, SideChannel
from hvd_hetero.errors import HeteroError
from hvd_hetero.watchdog.judgement import Judgement, judge
from hvd_hetero.watchdog.patience import Patience, horovod_gives_up_s
from hvd_hetero.watchdog.whereabouts import Whereabouts, locate

logger = logging.getLogger("hvd_hetero.watchdog")

EXIT_CODE = 75
"""Exit code of a process that the watchdog ends: EX_TEMPFAIL, which nothing else here uses."""

_LOOKS = 6  # looks until the first warning, so that it is a sixth late at most (arbitrary)
_LONGEST_LOOK_S = 5.0
_IN_TIME = 1 / 3  # of the time after which collectives give up; questions take some seconds (arbitrary)
_ANSWER_S = 1.0  # a rank that has not answered by then is asked again
_ASKED = 3  # questions before a rank counts as silent
_STOPPED_S = 2 * _ASKED * _ANSWER_S  # with some looks, longer than this thread takes if it gets to run
_MANY = 32  # with more ranks than this, each asks less often
_FIRST_ASKED = 6  # looks that ask ranks without an answer once, to learn whether packets pass
_ANSWERS_FOR_S = 600.0  # how long to answer once the training is gone (arbitrary)
_SAID = 3  # times the end is announced, because packets may be lost
_SHARED = ("PlanMismatchError", "HorovodInternalError", "PeerLostError", "Horovod has been shut down")
"""Errors that other ranks have, too, or that follow from another rank's."""
_LAST_RESORT_S = 20.0  # time for the last messages (arbitrary)
_CLOSE_S = 1.0  # for a look or an answer under way (arbitrary)
_LAST_S = 1.0  # time for packets and standard error to leave before the process ends

_known: list[weakref.ref[Balancer]] = []  # a rank makes progress if any of its trainings does
_reads_or_adds = threading.Lock()


def join_known(balancer: Balancer) -> None:
    """Note one more training of this process."""
    with _reads_or_adds:
        _known[:] = [*(known for known in _known if known() is not None), weakref.ref(balancer)]


def _progress() -> int:
    with _reads_or_adds:
        alive = [balancer for known in _known if (balancer := known()) is not None]
    return sum(each.rounds + each.micro_batches_so_far for each in alive)


class Watchdog:
    """Report which rank this rank waits for, and end the job if the wait cannot end. One per training.

    It is a sleeping daemon thread. Every few seconds it looks at the finished rounds and micro-batches, and, if these
    stand still, at the stack of the training thread, so training pays nothing. ``gather`` is an allgather of one
    object, called once.

    Collectives may give up on a rank that is silent before ``patience.warn`` has passed, with an error that names no
    rank: Horovod's do after 30 s. So a silent rank is reported at a third of ``gives_up_s``.

    It ends the process by ``os._exit``, after the message, the stacks and ``last_words()``.

    A rank that ends by its own exception announces it to the others at its exit: their collectives end with an error
    that names no rank, such as Horovod's "has been shut down".

    Rejected: waking the training thread by shutting Horovod down. That does not wake it if a rank was stopped, and the
    error it gets restarts an elastic job, which then gets stuck again. Rejected, too: Horovod's
    ``HOROVOD_STALL_CHECK_TIME_SECONDS``. A stopped rank blocks the negotiation that makes this check, and it knows
    names of tensors, not lines of a program.
    """

    def __init__(
        self,
        balancer: Balancer,
        generation: int,
        gather: Callable[[bytes], Sequence[bytes]],
        *,
        patience: Patience | None = None,
        waits_in: Sequence[str] = ("horovod.",),
        waits_at_the_end_in: Sequence[str] = (),
        gives_up_s: float | None = None,
        last_words: Callable[[], None] = lambda: None,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self.patience = Patience.of_environment() if patience is None else patience
        self._gives_up_s = horovod_gives_up_s() if gives_up_s is None else gives_up_s
        self._balancer = weakref.ref(balancer)
        self._waits_in = tuple(waits_in)
        self._waits_at_the_end_in = (*self._waits_in, *waits_at_the_end_in)
        self._last_words = last_words
        self._end = end
        self._trains = threading.get_ident()
        self._thread: threading.Thread | None = None
        self._rank = balancer.rank
        self._mark: tuple[object, ...] = ()  # training's progress at the last look
        self._found: tuple[object, ...] | None = None  # where this rank is since then; None: not looked yet
        self._since = self._looked_at = time.monotonic()
        self._says_at = self.patience.warn
        self._told_of_silence = False
        self._silent_since: dict[int, float] = {}
        self._answers_until = 0.0
        self._closed = False
        self._heard_of_failure = False
        self.channel: SideChannel | None = None
        """The channel that it asks by, which also carries the signals of non-blocking rounds; None: there is none."""
        self._hosts: tuple[str, ...] = ()
        if balancer.workers == 1:
            return
        join_known(balancer)
        sockets, troubles = listen()
        try:
            directory = gather_directory(balancer.rank, balancer.workers, sockets, troubles, gather, job_key())
        except HeteroError as error:  # on all ranks alike, because all have gathered the same
            for sock in sockets:
                sock.close()
            lost = "ranks that wait for one another will not be reported, and a rank that has finished ends no round"
            logger.warning("%s: %s", lost, error)
            return
        self._hosts = directory.hosts
        self.channel = SideChannel(balancer.rank, generation, directory, sockets, self._answer, self._hear)
        atexit.register(self._tell_if_failed)  # runs before Horovod's, which is older and ends the others' collectives
        name = f"hvd-hetero-watchdog-{balancer.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking and answering; thread and sockets are gone within a second, unless it is ending the job."""
        self._closed = True
        thread, self._thread = self._thread, None
        if self.channel is not None and thread is not None and thread is not threading.current_thread():
            self.channel.wake()
            thread.join(_CLOSE_S)

    def trains_here(self) -> None:
        """Note that the thread that calls is the one that trains. Until then, it is the one that made this."""
        self._trains = threading.get_ident()

    def where(self) -> Whereabouts:
        """Return where this rank is now, and note since when."""
        balancer = self._balancer()
        if balancer is None:
            waits, _, where = locate(self._trains, self._waits_in)
            stage, rounds = "over", -1
        else:
            ends, rounds = balancer.synchronising, balancer.rounds
            waits, of_its_own, where = locate(self._trains, self._waits_at_the_end_in if ends else self._waits_in)
            waits = waits or balancer.meter.reads  # in a thread of autograd, perhaps
            at_end = ends and waits and not of_its_own
            stage = f"{rounds} {'end' if at_end else 'body' if balancer.in_round else 'between'}"
        self._goes_on(balancer)
        found = (stage, waits, where)
        if self._found not in (None, found):
            self._begin_to_wait()
        self._found = found
        return Whereabouts(self._rank, rounds, stage, waits, where, time.monotonic() - self._since)

    def _look(self, balancer: Balancer) -> Whereabouts | None:
        """Return where this rank is, if it stands still in a round; None if there is nothing to wait for."""
        return None if self._goes_on(balancer) or not balancer.in_round else self.where()

    def _goes_on(self, balancer: Balancer | None) -> bool:
        """Return whether training has gone on since the last look; if so, waiting begins now at the earliest."""
        now = time.monotonic()
        part = None if balancer is None else (balancer.in_round, balancer.synchronising)
        mark = (_progress(), part)
        # A long time without a look means that this process was stopped, with or without the others.
        goes_on = mark != self._mark or now - self._looked_at > _STOPPED_S + 4 * self._look_s
        self._mark, self._looked_at = mark, now
        if goes_on:
            self._found = None
            self._begin_to_wait()
        return goes_on

    def _begin_to_wait(self) -> None:
        self._since = time.monotonic()
        self._says_at = self.patience.warn
        self._told_of_silence = False
        self._silent_since.clear()

    @property
    def _look_s(self) -> float:
        return min(self._first_s / _LOOKS, _LONGEST_LOOK_S, self._gives_up_s / _LOOKS)

    @property
    def _first_s(self) -> float:
        """Seconds of waiting before there is anything to report or do."""
        patience = self.patience
        return min(patience.warn, patience.deadlock, patience.silent, patience.busy)

    @property
    def _asks_s(self) -> float:
        """Seconds of waiting before this rank asks the others: early enough to name a silent one in time."""
        return self._first_s if self._first_s == math.inf else min(self._first_s, self._gives_up_s * _IN_TIME)

    def _run(self) -> None:
        channel = self.channel
        assert channel is not None, "it is made before the thread"
        try:
            looks = 0
            asks_at = 0.0
            channel.ask()
            while not self._closed:
                self._listen(self._look_s)
                balancer = self._balancer()
                if balancer is None:
                    if not self._answers_until:  # another rank may be in the middle of a round
                        self._answers_until = time.monotonic() + _ANSWERS_FOR_S
                    elif time.monotonic() > self._answers_until:
                        return
                    continue
                mine, ends_first = self._look(balancer), balancer.plan().ends == "first"
                del balancer
                if mine and mine.waits and mine.for_s >= self._asks_s and time.monotonic() >= asks_at:
                    asks_at = time.monotonic() + self._look_s * len(channel.answers) / _MANY
                    self._inquire(mine)
                elif looks < _FIRST_ASKED:
                    channel.ask_again()
                elif looks == _FIRST_ASKED and ends_first:
                    self._tell_of_unheard(channel.heard)
                looks += 1
        except Exception:
            if not self._closed:
                logger.exception(
                    "rank %d: the watchdog failed; waits are no longer watched, and non-blocking rounds end late",
                    self._rank,
                )
        finally:
            atexit.unregister(self._tell_if_failed)
            channel.close()

    def _tell_of_unheard(self, heard: Container[int]) -> None:
        """Warn of ranks whose packets do not pass: whoever finishes a round is not heard by them, nor they by it."""
        silent = [rank for rank in range(len(self._hosts)) if rank != self._rank and rank not in heard]
        if silent:
            logger.warning(
                "rank %d: no packet of ranks %s (%s) has come, so rounds that end when the first rank has finished end "
                "late; let UDP pass between the hosts (docs/hosts.md)", self._rank, silent,
                ", ".join(sorted({self._hosts[rank] for rank in silent})),
            )  # fmt: skip

    def _listen(self, seconds: float) -> None:
        """Serve packets for ``seconds``."""
        assert self.channel is not None, "its thread runs"
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._closed:
            self.channel.listen(left)

    def _inquire(self, mine: Whereabouts) -> None:
        """Ask all others where they are, and report the finding or end the job."""
        balancer, channel = self._balancer(), self.channel
        if balancer is None or channel is None:
            return
        workers, way_out = balancer.workers, balancer.ways_out.waiting
        del balancer
        channel.ask()
        for _ in range(_ASKED):
            self._listen(_ANSWER_S)
            if len(channel.answers) == workers - 1:
                break
            channel.ask_again()
        now = time.monotonic()
        others = [other for other in map(Whereabouts.decode, channel.answers.values()) if other is not None]
        missing = set(range(workers)) - {self._rank, *channel.answers}
        self._silent_since = {rank: self._silent_since.get(rank, now) for rank in missing}
        silent = {
            rank: now - since if rank in channel.heard else math.nan for rank, since in self._silent_since.items()
        }
        if self.where().for_s < mine.for_s:
            return  # it has made progress meanwhile
        finding = judge(mine, others, silent, self.patience, way_out, self._hosts, self._gives_up_s)
        if finding.ends:
            for _ in range(_SAID):
                channel.announce(Kind.END, finding.text)
            self._end_here(finding.text)
        elif mine.for_s >= self._says_at or (finding.silence and not self._told_of_silence):
            self._says_at = max(self._says_at, 2 * mine.for_s)
            self._told_of_silence = finding.silence
            self._say(finding)

    def _say(self, finding: Judgement) -> None:
        if finding.speaks:
            logger.warning("%s", finding.text)

    def _answer(self) -> bytes:
        return self.where().encode()

    def _hear(self, kind: Kind, rank: int, text: str) -> None:
        if kind == Kind.END:
            self._end_here(f"rank {rank} ends the job: {text} (Rank {self._rank} was at {self.where().where}.)")
        elif not self._heard_of_failure:
            self._heard_of_failure = True
            logger.error("rank %d has failed: %s. Errors of collectives follow from that.", rank, text.rstrip("."))

    def _tell_if_failed(self) -> None:
        """Announce to the others which exception ends this process."""
        error = getattr(sys, "last_value", None)  # what the interpreter prints as it ends
        if error is None or self.channel is None or self._closed or self._heard_of_failure:
            return
        text = f"{type(error).__name__}: {error}"
        if not any(name in text for name in _SHARED):
            for _ in range(_SAID):
                self.channel.announce(Kind.FAILED, text)

    def _end_here(self, text: str) -> None:
        """End this rank with a message, whatever its main thread does."""
        if self._closed:
            return
        self._closed = True
        # A message may wait for a lock that the training thread holds; the process must end all the same.
        last_resort = threading.Timer(_LAST_RESORT_S, self._end, (EXIT_CODE,))
        last_resort.daemon = True
        last_resort.start()
        logger.error("%s", text)
        with contextlib.suppress(Exception):  # standard error may be no file, as in a notebook
            faulthandler.dump_traceback(all_threads=True)
        with contextlib.suppress(Exception):
            self._last_words()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        time.sleep(_LAST_S)
        last_resort.cancel()
        self._end(EXIT_CODE)
