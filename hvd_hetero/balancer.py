"""The state machine that an adapter drives: plan, compute, synchronise, agree.

            begin(micro-batch)            report()                agree(sum)
    AGREED ───────────────────▶ COMPUTING ─────────▶ SYNCHRONISING ─────────▶ AGREED
                                 │      ▲
                           pause()      begin(next micro-batch)
                                 ▼      │
                                 PAUSED ┘

A round that ends when the first rank is done has one more way on: ``stop_early`` turns the micro-batch at hand into the
last one, once another rank has signalled that it has finished.

One rank's balancer hears what the rank did and the table that all ranks share, and says what comes next. It moves no
tensor, calls no collective and owns no clock: the clock is handed to it, and the adapter carries the vectors.

**The gradient.** With n_j samples in micro-batch j of a rank, its mean gradient g_j, and X samples planned for the
round, the ranks sum ``Σ_j (n_j / X) g_j``, which is the mean gradient of all X samples, whatever the split. Inside a
rank the accumulator is kept in units of the present micro-batch, ``A_j = A_{j-1} · n_{j-1} / n_j + g_j``: the
frameworks accumulate g_j themselves, so nothing is to be done while the sizes are equal (``rescale == 1``), and one
factor ``weight = n_last / X`` follows at the end, n_last being of the last micro-batch that held any. Where the samples
really used, S, are not the X planned, everybody multiplies the sum by ``X / S`` afterwards; S is in the table.

A rank that stopped early has done S_i of its x_i samples; nothing else changes. Under the rule of non-blocking SGD its
gradient is further multiplied by the share that it did, S_i / x_i, and no rank multiplies by X / S.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_hetero.checks import require_version
from hvd_hetero.communication.wire import Signals
from hvd_hetero.consistency import Agreement, WaysOut, require_finite
from hvd_hetero.errors import HeteroError, RoundStateError
from hvd_hetero.measurement.hindrances import HindranceMeter
from hvd_hetero.measurement.readings import ResourceMeter
from hvd_hetero.measurement.speed_meter import SpeedMeter
from hvd_hetero.planner import Planner
from hvd_hetero.policies import Policy
from hvd_hetero.rounds import FinishedRound, MicroBatch, RoundPlan, RoundReport, RoundTable

__all__ = ["Balancer"]

logger = logging.getLogger(__name__)

_STATE_VERSION = 5


class _State(enum.Enum):
    AGREED = "between two rounds"
    COMPUTING = "computing a micro-batch"
    PAUSED = "between two micro-batches of a round"
    SYNCHRONISING = "synchronising"


class Balancer:
    """The rounds of one rank. ``clock`` gives monotonic seconds; ``observer`` is called with every finished round."""

    def __init__(
        self,
        policy: Policy,
        rank: int,
        workers: int,
        global_batch: int,
        *,
        clock: Callable[[], float],
        readings: ResourceMeter | None = None,
        hindrances: HindranceMeter | None = None,
        observer: Callable[[FinishedRound], None] | None = None,
    ) -> None:
        self._planner = Planner(policy, workers, global_batch, logs=rank == 0)
        self.policy = policy
        self.rank = rank
        self.workers = workers
        self.global_batch = self._planner.global_batch
        self.signals: Signals | None = None
        """What policies need whose rounds end when the first rank is done."""
        self.observer = observer
        self.next_round_over: Callable[[], None] | None = None
        """A function to call once, when the next round is agreed."""
        self.ways_out = WaysOut()
        """What errors tell users of this framework to do."""
        self.allow_nan = False
        self.agreement = Agreement()
        self.kernels = 0.0
        """What updates are computed by (``hvd_hetero.witness.kernels``)."""
        self.finished: FinishedRound | None = None
        """The latest round that all ranks have agreed on."""
        self.meter = SpeedMeter(
            policy.predictor(), clock, readings, self._planner.typical_size, hindrances,
            profile=policy.profile(), weighs_fixed_cost=policy.weighs_fixed_cost,
        )  # fmt: skip
        self._clock = clock
        self._state = _State.AGREED
        self._work = MicroBatch(self.plan(), 0)
        self.weight = 0.0
        """The factor of the accumulated gradient, before it is summed over the ranks."""
        self._expected_s = self._transfer_s = float("nan")
        self._agreed_at = clock()
        self._heard: RoundTable | None = None
        self._reset_round()

    @property
    def rounds(self) -> int:
        """Rounds agreed so far."""
        return self._planner.rounds

    @property
    def since_round_s(self) -> float:
        """Seconds since the latest round was agreed; NaN before the first one."""
        return float("nan") if self.finished is None else self._clock() - self._agreed_at

    @property
    def lead(self) -> int:
        """How many rounds ahead plans are fixed."""
        return self._planner.lead

    def set_lead(self, rounds: int) -> None:
        """Fix plans this many rounds ahead. Before the first round only, and the same on every rank."""
        self._planner.set_lead(rounds, begun=self.in_round)

    def plan(self, ahead: int = 0) -> RoundPlan:
        """The plan of the round that is ``ahead`` rounds after the present one (or the next, between rounds)."""
        return self._planner.plan(ahead)

    # What the rank does.

    @property
    def in_round(self) -> bool:
        """Whether gradients of a round are being gathered."""
        return self._state is not _State.AGREED

    @property
    def work(self) -> MicroBatch:
        """The micro-batch at hand, or the last one."""
        return self._work

    @property
    def computing(self) -> bool:
        """Whether a micro-batch is at work."""
        return self._state is _State.COMPUTING

    @property
    def at_work(self) -> bool:
        """Whether a micro-batch is, or the row of the table has left, as it may before the last gradient is there."""
        return self._state in (_State.COMPUTING, _State.SYNCHRONISING)

    @property
    def synchronising(self) -> bool:
        """Whether this rank's row of the table has left, so that it waits for the others at the end of the round."""
        return self._state is _State.SYNCHRONISING

    @property
    def between_updates(self) -> bool:
        """Whether gradients are still being gathered for an update: not during the last micro-batch, nor after it."""
        return self.in_round and not self.closing

    @property
    def accumulating(self) -> bool:
        """Whether the gradient of an earlier micro-batch of this round waits to be added to."""
        return self.micro_batches_so_far > 0 and self._state in (_State.PAUSED, _State.COMPUTING)

    @property
    def closing(self) -> bool:
        """Whether the micro-batch at work is the last of its round, so that the synchronisation follows."""
        return self._state is _State.SYNCHRONISING or (self._state is _State.COMPUTING and self._work.last)

    @property
    def micro_batches_so_far(self) -> int:
        """Micro-batches that this rank has done in this round."""
        return self.meter.round.micro_batches

    @property
    def samples_so_far(self) -> int:
        """Samples of this rank in this round, those of the micro-batch at hand included."""
        return self.meter.round.samples + self._work.samples

    @property
    def rescale(self) -> float:
        """What to multiply the gradient accumulated so far by before this micro-batch adds to it."""
        return self._rescale

    def expect_next(self) -> None:
        """Raise if the micro-batch at hand is not finished, so that no other can begin."""
        if self._state in (_State.COMPUTING, _State.SYNCHRONISING):
            raise RoundStateError(f"the next batch was asked for before the last one was used. {self.ways_out.unused}")

    def begin(self, work: MicroBatch, input_s: float = 0.0) -> None:
        """A micro-batch is at hand after ``input_s`` seconds of waiting for it; computing starts now."""
        self.expect_next()
        self._rescale = self._work.samples / work.samples if self.micro_batches_so_far and work.samples else 1.0
        self._work = work
        if work.samples or not self.micro_batches_so_far:  # else what is gathered keeps its units, and nothing is added
            self.weight = work.samples / work.plan.total
        self._state = _State.COMPUTING
        self.meter.begin(input_s)

    def pause(self) -> None:
        """A micro-batch is done and is not the last of its round."""
        self._expect(_State.COMPUTING)
        self.meter.done(self._work.samples)
        self._state = _State.PAUSED

    def stop_early(self) -> bool:
        """Whether another rank has finished the round, or is about to: the micro-batch just computed is the last."""
        if self._state is not _State.COMPUTING or self._work.last or self._work.plan.ends != "first":
            return False
        if self.signals is None:
            return False
        self.meter.catch_up()
        if not self.signals.raised(self.rounds):
            # Work that is queued runs behind the clock, which then tells nothing of how far it is.
            end, meter = self._planner.anticipation, self.meter
            if end is None or meter.queued:
                return False
            if not end.ends_before(meter.busy_s, meter.once_s, self.micro_batches_so_far + 1):
                return False
            self._finishes = False
        if self.policy.weighs_twice:
            self.weight *= self.samples_so_far / self._work.plan.samples[self.rank]
        self._work = replace(self._work, last=True)
        return True

    def out_of_memory(self, *, cramped: bool = False, again: bool = False) -> int:
        """The micro-batch at hand does not fit. Returns how large its parts may be, which come next.

        Every rank learns of the limit with the next table, and from then on plans keep to it. Where something else may
        still have held memory (``cramped``), that it failed says nothing of its size. If what the round had gathered
        before is lost with it, all of the round is done ``again``.
        """
        self._expect(_State.COMPUTING)
        size = self._work.samples
        if size < 2:
            raise HeteroError(
                f"round {self.rounds}: rank {self.rank} has no memory for one sample; {self.ways_out.memory}"
            )
        if again:
            self._reset_round()
        else:
            self._state = _State.PAUSED  # also of the first: the round goes on, and gradients may have left
        return self.meter.failed(size, cramped=cramped)

    def report(
        self,
        *,
        settings: float = 0.0,
        witness: float = 0.0,
        bits: float = 0.0,
        broken: float = 0.0,
        trained: int = 0,
        ended: bool = False,
        dtype: npt.DTypeLike = np.float64,
    ) -> npt.NDArray[Any]:
        """The last gradient is ready: this rank's contribution to the table, to be summed over all ranks.

        ``broken`` is 1 if the gradient is not finite, ``trained`` a checksum of which parameters are trained; ``ended``
        says whether data that this rank reads alone end with this round.
        """
        self._expect(_State.COMPUTING)
        work = self._work
        self.meter.done(work.samples)
        self._state = _State.SYNCHRONISING
        if work.plan.ends == "first" and self.signals is not None and self._finishes:
            self.meter.catch_up()  # who has merely queued all of its work is not done
            self.signals.raise_signal(self.rounds)  # of one that has been raised already, this says nothing new
        # Fewer than planned, in a round that no rank ends early: the data of this rank have ended.
        fewer = work.plan.ends == "all" and self.meter.round.samples < work.plan.samples[self.rank]
        self.meter.learn(short=fewer or self._planner.is_short(work.plan))
        return RoundReport(
            fingerprint=work.plan.fingerprint(work.data ^ trained),
            settings=settings,
            witness=witness,
            bits=bits,
            kernels=self.kernels,
            broken=broken,
            contents=work.contents,
            ended=float(ended),
            **self.meter.row(),
        ).vector(self.rank, self.workers, dtype)

    def waiting(self) -> tuple[float, float]:
        """The table has left, and there is time. Returns the seconds that the wait and the transfer in it will take.

        The estimate is the last round's: the rank's own wait, and the shortest wait of any rank, since the last to come
        waits only for the transfer. NaN where there was no such round, or where layers waited in it, too.
        """
        self._expect(_State.SYNCHRONISING)
        self.meter.rest()
        return self._expected_s, self._transfer_s

    def hear(self, summed: list[float] | npt.NDArray[Any]) -> None:
        """The table has arrived: raise, on every rank alike, if any of them has gone its own way."""
        self._expect(_State.SYNCHRONISING)
        self._heard = RoundTable(summed, self.workers)
        self.agreement.require(self.rounds, self._heard, self.ways_out)

    def agree(self, summed: list[float] | npt.NDArray[Any] | None = None) -> float:
        """All sums have arrived (the table's has been heard, or is given): decide the next plan.

        Returns what to multiply the summed gradient by.
        """
        self._expect(_State.SYNCHRONISING)
        now = self._clock()
        if summed is not None:
            self.hear(summed)
        assert self._heard is not None, "hear() comes first"
        table, self._heard = self._heard, None
        self._expected_s = now - self.meter.done_at
        # Transfers in layers are told with the others, and this is of the one at the end, whose time is not known then.
        self._transfer_s = float("nan") if self.meter.was_held_up else table.transfer_s
        finished = FinishedRound(self.rounds, self._work.epoch, self._work.plan, table, now - self._agreed_at)
        self._planner.learn(finished)
        self.finished = finished
        self._finishes = True
        if self.next_round_over is not None:
            call, self.next_round_over = self.next_round_over, None
            call()
        if self.observer is not None:
            self.observer(finished)
        self._agreed_at = now
        planned, used = self._work.plan.total, table.total
        self.meter.end_round(now)
        if self.meter.pace is not None and self._planner.fixed_costs is not None:
            self.meter.pace.know(float(self._planner.fixed_costs.samples[self.rank]))
        self._state = _State.AGREED
        self._rescale = 1.0
        return planned / used if used and not self.policy.weighs_twice else 1.0

    def require_finite(self) -> None:
        """Raise if some rank's gradient of the round just agreed is not finite: the update is about to be made."""
        assert self.finished is not None, "a round has been agreed"
        require_finite(self.finished.round, self.finished.table.column("broken"))

    def applying(self) -> None:
        """The optimizer's update begins; needed where work is queued, for its time is not the caller's."""
        self.meter.applying()

    def applied(self, seconds: float) -> None:
        """The optimizer's update took this long."""
        self.meter.applied(seconds)

    def abandon(self) -> None:
        """Forget the round at hand, which no synchronisation has seen; its plan is used for the next one."""
        if self._state is _State.SYNCHRONISING:
            raise RoundStateError("a round that is being synchronised cannot be abandoned")
        self._reset_round()

    def state_dict(self) -> dict[str, Any]:
        """The plans decided, what the policy keeps, and what this rank has learned of itself; between rounds only."""
        self._expect(_State.AGREED)
        return {"version": _STATE_VERSION, **self._planner.state_dict(), "pace": self.meter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another job left off, with the same policy, ranks, global batch and lead."""
        self._expect(_State.AGREED)
        require_version(state, "the balance", _STATE_VERSION)
        self._planner.require_fitting(state)
        self.meter.load_state_dict(state["pace"])  # may refuse: then the plans are as they were
        self._planner.load_state_dict(state)

    # A change of membership, between two rounds.

    @property
    def prospects(self) -> tuple[float, int]:
        """The speed that this rank expects of itself (NaN: not known), and its limit of memory (0: not known)."""
        return self.meter.expected(), self.meter.limit

    def load_own_state(self, pace: Mapping[str, Any]) -> None:
        """Take up what this rank has learned of itself, and nothing else: ``pace`` of a ``state_dict``."""
        self.meter.load_state_dict(pace)

    def go_on(self, common: Mapping[str, Any], prospects: Sequence[tuple[float, int]], *, same_ranks: bool) -> bool:
        """Go on after the rounds of a state, the same on every rank; return whether its plans hold.

        They do if the ranks are the same and train by the same terms. Otherwise the policy renegotiates the shares by
        all ranks' ``prospects``.
        """
        self._expect(_State.AGREED)
        if same_ranks and self._planner.fits(common):
            try:
                self._planner.load_state_dict(common)
            except ValueError as error:  # the policy has other options now
                logger.warning("shares are negotiated again: %s", error)
            else:
                return True
        speeds, limits = zip(*prospects, strict=True)
        self._planner.renegotiate(common, speeds, limits)
        return False

    def _expect(self, state: _State) -> None:
        if self._state is not state:
            raise RoundStateError(f"expected to be {state.value}, but this rank is {self._state.value}")

    def _reset_round(self) -> None:
        self._state = _State.AGREED
        self._rescale = 1.0
        self._finishes = True
        self.meter.forget()
