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
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import astuple, dataclass, field

from hvd_hetero.balancer import Balancer
from hvd_hetero.communication.addresses import gather_directory, job_key, listen
from hvd_hetero.communication.side_channel import Kind, SideChannel
from hvd_hetero.errors import HeteroError
from hvd_hetero.measurement.memory_errors import is_out_of_memory
from hvd_hetero.watchdog.judgement import judge
from hvd_hetero.watchdog.patience import Patience, horovod_timeout_s
from hvd_hetero.watchdog.progress import Progress, register_training
from hvd_hetero.watchdog.whereabouts import Whereabouts

logger = logging.getLogger("hvd_hetero.watchdog")

EXIT_CODE = 75
"""Exit code of a process that the watchdog ends: EX_TEMPFAIL, which nothing else here uses."""

# So that the first warning is a sixth late at most (arbitrary); as many looks at the start find who is unreachable.
_LOOKS_BEFORE_WARNING = 6
# For packets to come or to leave, and for a look under way to end (arbitrary).
_PACKET_WAIT_S = 1.0
# Packets may be lost: a rank is silent after so many questions, and an end is announced as often.
_PACKET_REPEATS = 3
# How long other ranks get answers once this rank's training is gone (arbitrary).
_ANSWERS_FOR_S = 600.0
_SHARED = ("PlanMismatchError", "HorovodInternalError", "PeerLostError", "Horovod has been shut down")
"""Errors that other ranks have, too, or that follow from another rank's."""


@dataclass
class _Wait:
    """One wait: what was reported of it, and since when other ranks give no answer."""

    since: float
    report_at: float
    silence_reported: bool = False
    silent_since: dict[int, float] = field(default_factory=dict)


class Watchdog:
    """Report which rank this rank waits for, and end the job if the wait cannot end. One per training.

    It is a sleeping daemon thread. Every few seconds it looks at the finished rounds and micro-batches. If these stand
    still, it looks at the stack of the training thread, so training pays nothing. ``gather`` is an allgather of one
    object, called once.

    It ends the process by ``os._exit``, after the message, the stacks and ``last_words()``.

    A rank that ends by its own exception announces it to the others at its exit. Their collectives end with an error
    that names no rank, such as Horovod's "has been shut down".

    docs/waiting.md says why Horovod's own check of stalls does not help.
    """

    def __init__(
        self,
        balancer: Balancer,
        training: int,
        gather: Callable[[bytes], Sequence[bytes]],
        *,
        patience: Patience | None = None,
        waits_in: Sequence[str] = ("horovod.",),
        waits_at_the_end_in: Sequence[str] = (),
        collective_timeout_s: float | None = None,
        last_words: Callable[[], None] = lambda: None,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self.patience = Patience.of_environment() if patience is None else patience
        self._collective_timeout_s = horovod_timeout_s() if collective_timeout_s is None else collective_timeout_s
        self._first_s = min(astuple(self.patience))  # of waiting, before there is anything to report or do
        self._look_s = min(
            self._first_s / _LOOKS_BEFORE_WARNING, 5.0, self._collective_timeout_s / _LOOKS_BEFORE_WARNING
        )
        # Longer than this thread takes from one look to the next if it gets to run.
        stopped_s = 2 * _PACKET_REPEATS * _PACKET_WAIT_S + 4 * self._look_s
        self._progress = Progress(balancer, waits_in, waits_at_the_end_in, stopped_s)
        self._last_words = last_words
        self._end = end
        self._thread: threading.Thread | None = None
        self._wait = _Wait(-math.inf, 0.0)
        self._closed = False
        self._failure_reported = False
        self.channel: SideChannel | None = None
        """The channel that it asks by, which also carries the signals of non-blocking rounds; None: there is none."""
        self._hosts: tuple[str, ...] = ()
        if balancer.workers == 1:
            return
        register_training(balancer)
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
        where = self._progress.where
        channel = SideChannel(balancer.rank, training, directory, sockets, lambda: where().encode(), self._receive_end)
        self.channel = channel
        # Runs before Horovod's, which is older and ends the others' collectives.
        atexit.register(self._announce_failure)
        name = f"hvd-hetero-watchdog-{balancer.rank}"
        self._thread = threading.Thread(target=self._run, args=(channel,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking and answering; thread and sockets are gone within a second, unless it is ending the job."""
        self._closed = True
        thread, self._thread = self._thread, None
        if self.channel is not None and thread is not None and thread is not threading.current_thread():
            self.channel.wake()
            thread.join(_PACKET_WAIT_S)

    def trains_here(self) -> None:
        """Note that the thread that calls is the one that trains. Until then, it is the one that made this."""
        self._progress.thread = threading.get_ident()

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Watch a wait of this thread for all ranks outside of a round."""
        self._progress.joins = True
        try:
            yield
        finally:
            self._progress.joins = False

    def end_others(self, text: str) -> None:
        """End all other ranks with this message."""
        for _ in range(_PACKET_REPEATS if self.channel is not None and not self._closed else 0):
            self.channel.announce(Kind.END, text)  # type: ignore[union-attr]

    def _run(self, channel: SideChannel) -> None:
        # Collectives may give up on a silent rank before `patience.warn` has passed, with an error that names no rank:
        # Horovod's do after 30 s. A third of that is arbitrary; questions take some seconds.
        timeout_s = self._collective_timeout_s
        asks_after_s = min(self._first_s, timeout_s / 3) if self._first_s < math.inf else math.inf
        looks, asks_at, answers_until = 0, 0.0, math.inf
        try:
            channel.ask()
            while not self._closed and time.monotonic() <= answers_until:
                self._listen(channel, self._look_s)
                balancer = self._progress.training
                if balancer is None:  # another rank may be in the middle of a round
                    answers_until = min(answers_until, time.monotonic() + _ANSWERS_FOR_S)
                    continue
                mine, plan = self._progress.standstill(balancer), balancer.plan()
                remedy = balancer.agreement.remedies.waiting
                del balancer
                if mine and mine.waits and mine.for_s >= asks_after_s and time.monotonic() >= asks_at:
                    # With more than 32 ranks (arbitrary) each asks less often.
                    asks_at = time.monotonic() + self._look_s * len(channel.answers) / 32
                    self._inquire(channel, mine, remedy)
                elif looks < _LOOKS_BEFORE_WARNING:
                    # Ranks without an answer so far: whether packets pass at all.
                    channel.ask_again()
                elif looks == _LOOKS_BEFORE_WARNING and plan.ends == "first":
                    self._warn_of_unreachable(channel.answered)
                looks += 1
        except Exception:
            if not self._closed:
                logger.exception(
                    "rank %d: the watchdog failed; waits are no longer watched, and non-blocking rounds end late",
                    self._progress.rank,
                )
        finally:
            atexit.unregister(self._announce_failure)
            channel.close()

    def _warn_of_unreachable(self, answered: Container[int]) -> None:
        """Warn of ranks from which no packet has come: signals that end a round pass neither to nor from them."""
        silent = [rank for rank in range(len(self._hosts)) if rank != self._progress.rank and rank not in answered]
        if silent:
            logger.warning(
                "rank %d: no packet of ranks %s (%s) has come, so rounds that end when the first rank has finished end "
                "late; let UDP pass between the hosts (docs/hosts.md)", self._progress.rank, silent,
                ", ".join(sorted({self._hosts[rank] for rank in silent})),
            )  # fmt: skip

    def _listen(self, channel: SideChannel, seconds: float) -> None:
        """Answer the packets that come in ``seconds``."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._closed:
            channel.listen(left)

    def _inquire(self, channel: SideChannel, mine: Whereabouts, remedy: str) -> None:
        """Ask all others where they are, and report the finding or end the job."""
        workers = len(self._hosts)
        channel.ask()
        for _ in range(_PACKET_REPEATS):
            self._listen(channel, _PACKET_WAIT_S)
            if len(channel.answers) == workers - 1:
                break
            channel.ask_again()
        others = list(map(Whereabouts.decode, channel.answers.values()))
        missing = set(range(workers)) - {mine.rank, *channel.answers}
        if self._progress.where().for_s < mine.for_s:
            return  # it has made progress meanwhile
        if self._wait.since != self._progress.since:
            self._wait = _Wait(self._progress.since, self.patience.warn)
        wait, now = self._wait, time.monotonic()
        wait.silent_since = {rank: wait.silent_since.get(rank, now) for rank in missing}
        silent = {rank: now - at if rank in channel.answered else math.nan for rank, at in wait.silent_since.items()}
        finding = judge(mine, others, silent, self.patience, remedy, self._hosts, self._collective_timeout_s)
        if finding.ends:
            self.end_others(finding.text)
            self._end_here(finding.text)
        elif mine.for_s >= wait.report_at or (finding.silence and not wait.silence_reported):
            wait.report_at, wait.silence_reported = max(wait.report_at, 2 * mine.for_s), finding.silence
            if finding.reports:
                logger.warning("%s", finding.text)

    def _receive_end(self, kind: Kind, rank: int, text: str) -> None:
        if kind == Kind.END:
            mine = self._progress.where()
            self._end_here(f"rank {rank} ends the job: {text} (Rank {mine.rank} was at {mine.where}.)")
        elif not self._failure_reported:
            self._failure_reported = True
            logger.error("rank %d has failed: %s. Errors of collectives follow from that.", rank, text.rstrip("."))

    def _announce_failure(self) -> None:
        """Announce to the others which exception ends this process."""
        error = getattr(sys, "last_value", None)  # what the interpreter prints as it ends
        if error is None or self.channel is None or self._closed or self._failure_reported:
            return
        text, balancer = f"{type(error).__name__}: {error}", self._progress.training
        stuck = is_out_of_memory(error) and "HOROVOD_ELASTIC" not in os.environ
        if stuck and balancer is not None and balancer.computing:
            self.end_others(str(balancer.out_of_memory_error("in a loop without surviving_out_of_memory()")))
        elif not any(name in text for name in _SHARED):
            for _ in range(_PACKET_REPEATS):
                self.channel.announce(Kind.FAILED, text)

    def _end_here(self, text: str) -> None:
        """End this rank with a message, whatever its main thread does."""
        if self._closed:
            return
        self._closed = True
        # Considered: waking the training thread by shutting Horovod down. That does not wake it if a rank was stopped,
        # and its error restarts an elastic job, which then gets stuck again. A message may wait for a lock that the
        # training thread holds; the process must end all the same, after 20 s (arbitrary).
        last_resort = threading.Timer(20.0, self._end, (EXIT_CODE,))
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
        time.sleep(_PACKET_WAIT_S)
        last_resort.cancel()
        self._end(EXIT_CODE)
