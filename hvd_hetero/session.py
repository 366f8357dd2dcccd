"""One training, in any framework: its policy, its rounds, and where their record goes."""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from hvd_hetero.balancer import Balancer
from hvd_hetero.bounds import require_same_bounds
from hvd_hetero.checks import integer
from hvd_hetero.communication.wire import SignalsOfThreads, Wire
from hvd_hetero.data.ledger import Ledger
from hvd_hetero.measurement.hindrances import HindranceMeter
from hvd_hetero.measurement.readings import ResourceMeter
from hvd_hetero.measurement.speed_meter import SpeedMeter
from hvd_hetero.policies.policy import Policy
from hvd_hetero.policies.policy_names import resolve_policy
from hvd_hetero.telemetry.records import Listener, Recorder
from hvd_hetero.watchdog import Patience, Watchdog

if TYPE_CHECKING:
    from hvd_hetero.policies.goodput import Goodput
    from hvd_hetero.telemetry.writer import Telemetry
    from hvd_hetero.topology.mixing import Mixing

# Every training has its own names on the wire, so that two of them in one job can be under way at once. Ranks make
# trainings in the same order, as they do everything that Horovod names. A rank that joined later has made fewer, so
# counters may differ: rank 0's holds.
_numbers = itertools.count()


class Session:
    """One rank's part of one training: its balancer, telemetry, signals, watchdog, and a prefix for names on the wire.

    ``waits_in`` and ``waits_at_the_end_in`` are the beginnings of names of modules in which a thread waits for other
    ranks: anywhere, and once its row of the table has left. Collectives fail ``collective_timeout_s`` after a rank fell
    silent (None: Horovod's time, see ``hvd_hetero.watchdog``). Ranks that are threads of one process have a
    ``thread_group``, which carries their signals. No watchdog looks after them, since it would end them all.
    ``device`` is the name of this rank's device, and the size of its memory in bytes (0: not known).
    """

    resumes: ClassVar[bool] = False
    """Whether this process has trained in an earlier membership: then trouble with a file must not end the job."""

    def __init__(
        self,
        policy: str | Policy,
        rank: int,
        workers: int,
        global_batch: int | Goodput,
        telemetry: str | os.PathLike[str] | Telemetry | None = None,
        *,
        progress: bool = False,
        sync: str | Mixing = "allreduce",
        allow_nan: bool = False,
        wire: Wire | None = None,
        patience: Patience | None = None,
        waits_in: Sequence[str] = ("horovod.",),
        waits_at_the_end_in: Sequence[str] = (),
        collective_timeout_s: float | None = None,
        thread_group: SignalsOfThreads | None = None,
        device: tuple[str, float] = ("", 0.0),
    ) -> None:
        if not isinstance(patience, Patience | None):
            raise TypeError(
                f"patience must be a Patience, got {patience!r}; write patience=hvd_hetero.watchdog.Patience(warn=30)"
            )
        patience = Patience.of_environment() if patience is None else patience
        policy, sizes = resolve_policy(policy), [device[1]] * workers
        self.devices = [device[0]] * workers
        """The names of the ranks' devices; empty where they have none."""
        if wire is not None and workers > 1:
            bound = getattr(policy, "max_micro_batch", None)
            of_ranks = wire.allgather_object((*device, bound), name="hetero.devices")
            names, sizes, bounds = map(list, zip(*of_ranks, strict=True))
            self.devices = names
            require_same_bounds("max_micro_batch", bounds, "give max_micro_batch=[…], with one bound for each rank")
        self.balancer = Balancer(
            policy,
            rank,
            workers,
            global_batch,
            clock=time.perf_counter,
            readings=ResourceMeter(clock=time.perf_counter),
            hindrances=HindranceMeter(clock=time.perf_counter),
            devices=self.devices,
        )
        self.balancer.planner.begin_by_memory(sizes)
        self.policy = self.balancer.policy
        mixing = None
        if sync != "allreduce":
            from hvd_hetero.topology.mixing import resolve_mixing

            mixing = resolve_mixing(sync, workers, updates_locally=self.policy.updates_locally)
            if self.balancer.planner.goodput is not None:
                raise ValueError(
                    f"global_batch=Goodput(…) goes by averaged gradients, and sync={sync!r} averages parameters; use "
                    "sync='allreduce', or a global_batch that stays"
                )
        self.balancer.agreement.allow_nan = allow_nan
        self._recorder = Recorder()
        if telemetry is not None:
            from hvd_hetero.telemetry.writer import Telemetry, TelemetryWriter

            if not isinstance(telemetry, Telemetry):
                telemetry = Telemetry(telemetry)  # on every rank, so that an error in it ends them all
            if telemetry.ledger:
                if mixing is not None or self.policy.updates_locally or self.policy.shrinks_early_steps:
                    raise ValueError(
                        "Telemetry(ledger=True) is for updates by the mean gradient of a round, which averaged "
                        "parameters (sync='d-psgd' or 'matcha', local updates) and scaling='n/N' have not; leave it out"
                    )
                self.balancer.ledger = Ledger(rank)
            if rank == 0:
                self._recorder = writer = TelemetryWriter(
                    telemetry,
                    policy=self.policy.name,
                    workers=workers,
                    global_batch=self.balancer.planner.global_batch,
                    goes_on=self.resumes,
                )
                if self.balancer.ledger is not None:
                    self.balancer.ledger.write = writer.file.write_ledger
                self._record()
        if progress and rank == 0:
            from hvd_hetero.telemetry.live import LiveView

            self._recorder.add(LiveView(), ours=True)
            self._record()
        # Drawn last: what fails above may fail on one rank alone, and all must have drawn as often.
        number = next(_numbers)
        if wire is not None:
            number = wire.broadcast_object(number, root_rank=0, name="hetero.number")
        self.prefix = f"hetero{number}"
        self.mixing = mixing
        if mixing is not None and wire is not None:
            # Rank 0's, for all: its probabilities are floating-point results of an optimisation.
            self.mixing = wire.broadcast_object(mixing, root_rank=0, name=f"{self.prefix}.mixing")
        # What the watchdog keeps must not lead back here: its thread would keep all of this alive.
        self._watchdog: Watchdog | None = None
        if wire is not None and thread_group is None:
            exchange = f"{self.prefix}.watchdog"
            self._watchdog = Watchdog(
                self.balancer,
                number,
                lambda payload: wire.allgather_object(payload, name=exchange),
                patience=patience,
                waits_in=waits_in,
                waits_at_the_end_in=waits_at_the_end_in,
                collective_timeout_s=collective_timeout_s,
                last_words=self._recorder.last_words,
            )
        if self.balancer.plan().ends == "first":
            channel = None if self._watchdog is None else self._watchdog.channel
            self.balancer.signals = channel if thread_group is None else thread_group.signals(number)

    @property
    def meter(self) -> SpeedMeter:
        """What this rank measures of itself."""
        return self.balancer.meter

    @property
    def depends_on_time(self) -> bool:
        """True if plans follow measured times, or rounds end when the first rank is done."""
        return self.policy.measures or self.balancer.plan().ends == "first"

    @property
    def sums_gradients(self) -> bool:
        """True if a round ends when all ranks are done, and only by a sum of gradients over all of them."""
        plan = self.balancer.plan()
        return plan.ends == "all" and not plan.local and self.mixing is None

    @property
    def averaging(self) -> str:
        """What decides how ranks average, in words: the policy, or that each has a model of its own."""
        return f"policy {self.policy.name!r}" if self.mixing is None else "sync='d-psgd' or 'matcha'"

    def trains_here(self) -> None:
        """Note that the calling thread trains: the watchdog looks at it if training stops."""
        if self._watchdog is not None:
            self._watchdog.trains_here()

    def joining(self) -> AbstractContextManager[None]:
        """Have the watchdog look after a wait for all ranks that is in no round."""
        return nullcontext() if self._watchdog is None else self._watchdog.joining()

    def on_round(self, function: Listener, every: int = 1) -> None:
        """Call ``function`` with the record of every ``every``-th round, on rank 0."""
        if not callable(function):
            raise TypeError(
                f"on_round needs a function that takes a record, got {function!r}; try balance.on_round(print)"
            )
        every = integer("every", every, 1, remedy="with 1 the function is called after every round")
        if self.balancer.rank == 0:
            self._recorder.add(function, every)
            self._record()

    def note_recovery(self, recovered_s: float) -> None:
        """Put the seconds of a recovery into the record of the round that ends, the first one after it."""
        if self.balancer.observer is not None:
            self._recorder.recovered_s = recovered_s

    def end_others(self, text: str) -> None:
        """End all other ranks with this message: they would wait for this one, which cannot go on."""
        if self._watchdog is not None and "HOROVOD_ELASTIC" not in os.environ:  # where others go on without it
            self._watchdog.end_others(text)

    def close(self) -> None:
        """Finish the telemetry and the watchdog. Done by itself when the process ends."""
        if self._watchdog is not None:
            self._watchdog.close()
        self._recorder.close()
        atexit.unregister(self._recorder.close)

    def _record(self) -> None:
        """Make records from now on; before, they had no reader."""
        if self.balancer.observer is None:
            self.balancer.observer = self._recorder
            atexit.register(self._recorder.close)


class LoadBalanceBase:
    """The base of ``LoadBalance`` in all frameworks: the properties that users read."""

    _session: Session

    @property
    def policy(self) -> Policy:
        """The policy, as an object."""
        return self._session.policy

    @property
    def rounds(self) -> int:
        """Rounds that all ranks have finished. The same number on every rank, so a loop can stop by it."""
        return self._session.balancer.rounds

    @property
    def progress(self) -> float:
        """Rounds, each counted as the rounds with the first global batch that it is worth: schedules go by it.

        It differs from ``rounds`` where the batch adapts (``hvd_hetero.policies.Goodput``).
        """
        return self._session.balancer.planner.progress

    @property
    def plan(self) -> tuple[int, ...]:
        """Samples of every rank in the current round (between rounds: in the next one)."""
        return self._session.balancer.plan().samples

    @property
    def batch_size(self) -> int:
        """Samples of this rank in the current round (between rounds: in the next one)."""
        return self.plan[self._session.balancer.rank]

    def on_round(self, function: Listener, *, every: int = 1) -> None:
        """Call ``function(record)`` after every round, or after every ``every``-th. Call this on all ranks alike.

            balance.on_round(lambda record: print(record["round"], record["samples"]))

        Rank 0 calls the function; other ranks only check the arguments. A record is a line of telemetry
        (``docs/telemetry.md``), as a dict. It comes one round late, because the waiting of a round is known only
        then. The last one comes with ``close()``, or when the process ends.

        All ranks wait while the function runs, so let it be quick. It must not call collectives. If it raises, the
        error is logged, and the function is called no more; training goes on. A ``close`` method of the function is
        called at the end. A function that refers to this object keeps it in memory until ``close()``.
        """
        self._session.on_round(function, every)

    def close(self) -> None:
        """Finish the telemetry and the watchdog. Done by itself when the process ends."""
        self._session.close()


def balancer_of(balance: LoadBalanceBase) -> Balancer:
    """Return the balancer behind a ``LoadBalance``, for code that looks into rounds or disturbs them."""
    return balance._session.balancer
