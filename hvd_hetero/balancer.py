"""The state machine that an adapter drives: plan, compute, synchronise, agree.

            begin(micro-batch)            report()                agree(sum)
    AGREED ───────────────────▶ COMPUTING ─────────▶ SYNCHRONISING ─────────▶ AGREED
                                 │      ▲
                           pause()      begin(next micro-batch)
                                 ▼      │
                                 PAUSED ┘

Where a round ends with the first rank, ``stop_early`` makes the current micro-batch the last one, once another rank
signals that it has finished.

One rank's balancer takes what the rank did and the table that all ranks share, and returns what comes next. It moves no
tensor, calls no collective and owns no clock: it is given the clock, and the adapter carries the vectors.

**The gradient.** Let micro-batch j of a rank have n_j samples and the mean gradient g_j, and the round X samples as
planned. The ranks sum ``Σ_j (n_j / X) g_j``, which is the mean gradient of all X samples, whatever the split. Inside a
rank the accumulator is kept in units of the present micro-batch, ``A_j = A_{j-1} · n_{j-1} / n_j + g_j``. One factor
``n_last / X`` follows at the end, where n_last is the size of the last micro-batch that held samples. If the round used
S samples instead of X, every rank multiplies the sum by ``X / S`` afterwards; S is in the table. Where the mean g_j is
over w_j of something else, such as tokens, w_j takes the place of n_j, and Σ w the place of S.

A rank that stopped early has done S_i of its x_i samples; nothing else changes. Under the rule of non-blocking SGD its
gradient is further multiplied by the share that it did, S_i / x_i, and no rank multiplies by X / S.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_hetero.bounds import NO_BOUND, bounds_array
from hvd_hetero.checks import require_version
from hvd_hetero.communication.wire import Signals
from hvd_hetero.consistency import Agreement, require_finite
from hvd_hetero.errors import HeteroError, RoundStateError
from hvd_hetero.measurement.hindrances import HindranceMeter
from hvd_hetero.measurement.readings import ResourceMeter
from hvd_hetero.measurement.speed_meter import SpeedMeter
from hvd_hetero.planner import Planner
from hvd_hetero.policies.policy import Policy
from hvd_hetero.rounds import LENGTHS, FinishedRound, MicroBatch, RoundPlan, RoundReport, RoundTable

if TYPE_CHECKING:
    from hvd_hetero.data.ledger import Ledger
    from hvd_hetero.policies.goodput import Goodput

logger = logging.getLogger(__name__)

WEIGHS_NOTHING = (
    "weight_of gave 0 for every batch of round {} (or masks hid all of it), on all ranks. A round needs a positive "
    "weight, since its gradient is a weighted mean. Raise global_batch, or leave out the samples of weight 0"
)
_STATE_VERSION = 9


class _State(enum.Enum):
    AGREED = "between two rounds"
    COMPUTING = "computing a micro-batch"
    PAUSED = "between two micro-batches of a round"
    SYNCHRONISING = "synchronising"


class GradientWeight:
    """The factors of one rank's gradients, by the formulas of the module's docstring."""

    def __init__(self) -> None:
        self.factor = 0.0
        """The factor of the accumulated gradient, before it is summed over the ranks."""
        self.rescale = 1.0
        """The factor for the gradient accumulated so far, before this micro-batch adds to it."""
        self.of_sample = 1.0
        """The mean weight of a sample, by the last table."""
        # The weight that the accumulated gradient is a mean of, with this micro-batch and without.
        self._units = self._before = 0.0

    def planned(self, work: MicroBatch) -> float:
        """Return the weight of the whole round if it is done as planned; ``agree`` corrects it."""
        # In tokens where a sample counts as many, by the last table, so that factors stay near 1.
        return work.plan.total * self.of_sample

    def begin(self, work: MicroBatch, *, first: bool) -> None:
        """Add the gradient of another micro-batch; ``first``: there is none in this round yet."""
        self._before = 0.0 if first else self._units
        self.weigh(work)

    def weigh(self, work: MicroBatch) -> None:
        """Set the factors for the weight of this micro-batch."""
        weight, before = work.gradient_weight, self._before
        # Frameworks add gradients themselves, so while the weights are equal (a factor of 1) nothing needs to be done.
        self.rescale = before / weight if before and weight else 1.0
        # Nothing is added for a weight of 0, so the accumulator keeps its units.
        self._units = weight or before
        self.factor = self._units / self.planned(work)


class Balancer:
    """The rounds of one rank. ``clock`` gives monotonic seconds; ``observer`` is called with every finished round."""

    def __init__(
        self,
        policy: Policy,
        rank: int,
        workers: int,
        global_batch: int | Goodput,
        *,
        clock: Callable[[], float],
        readings: ResourceMeter | None = None,
        hindrances: HindranceMeter | None = None,
        observer: Callable[[FinishedRound], None] | None = None,
        devices: Sequence[str] = (),
    ) -> None:
        self.planner = Planner(policy, workers, global_batch, logs=rank == 0, devices=devices)
        self.rank = rank
        self.signals: Signals | None = None
        """The channel that ends rounds early, for policies whose rounds end when the first rank is done."""
        self.observer = observer
        self.ledger: Ledger | None = None
        """The ledger of what all ranks do, if one is kept."""
        self.next_round_over: Callable[[], None] | None = None
        """A function to call once, when the next round is agreed."""
        self.agreement = Agreement()
        self.finished: FinishedRound | None = None
        """The latest round that all ranks have agreed on."""
        self.meter = SpeedMeter(
            self.policy.predictor(), clock, readings, self.planner.typical_size, hindrances,
            profile=self.policy.profile(), weighs_fixed_cost=self.planner.fixed_costs is not None,
        )  # fmt: skip
        self.bound(self.planner.room.user_bounds)
        self.gradient = GradientWeight()
        self._state = _State.AGREED
        self._work = MicroBatch(self.plan(), 0)
        self._wait_s = (math.nan, math.nan)
        """Seconds of the last round: this rank's wait, and the transfer in it."""
        self._agreed_at = clock()
        self._table: RoundTable | None = None
        self._reset_round()

    @property
    def policy(self) -> Policy:
        """The policy of this training."""
        return self.planner.policy

    def bound(self, bounds: npt.ArrayLike) -> None:
        """Bound each rank's micro-batches, in samples; before the first round, with the same bounds on all ranks."""
        room = self.planner.room
        room.user_bounds = room.held = bounds_array(bounds, self.workers)
        mine = int(room.user_bounds[self.rank])
        self.meter.memory.user_bound = mine if mine < NO_BOUND else 0

    @property
    def workers(self) -> int:
        """How many ranks there are."""
        return self.planner.workers

    @property
    def rounds(self) -> int:
        """Rounds agreed so far."""
        return self.planner.rounds

    def set_rounds_ahead(self, rounds: int) -> None:
        """Fix plans this many rounds ahead. Before the first round only, and the same on every rank."""
        self.planner.set_rounds_ahead(rounds, begun=self.in_round)

    def plan(self, ahead: int = 0) -> RoundPlan:
        """Return the plan of the round ``ahead`` rounds after the present one (or the next, between rounds)."""
        return self.planner.plan(ahead)

    # What the rank does.

    @property
    def in_round(self) -> bool:
        """Whether gradients of a round are being gathered."""
        return self._state is not _State.AGREED

    @property
    def work(self) -> MicroBatch:
        """The current micro-batch; between two, the latest one."""
        return self._work

    @property
    def computing(self) -> bool:
        """True while a micro-batch is computing."""
        return self._state is _State.COMPUTING

    @property
    def at_work(self) -> bool:
        """True while a micro-batch is computing or its report is being summed."""
        return self._state in (_State.COMPUTING, _State.SYNCHRONISING)

    @property
    def synchronising(self) -> bool:
        """True while this rank waits for the others at the end of a round: its row of the table was sent."""
        return self._state is _State.SYNCHRONISING

    @property
    def between_updates(self) -> bool:
        """True from the start of a round until its last micro-batch begins."""
        return self.in_round and not self.closing

    @property
    def accumulating(self) -> bool:
        """True while the gradient of an earlier micro-batch of this round is kept, for the next one to be added."""
        return self.meter.round.micro_batches > 0 and self._state in (_State.PAUSED, _State.COMPUTING)

    @property
    def closing(self) -> bool:
        """True while the last micro-batch of a round is computed or synchronised."""
        return self._state is _State.SYNCHRONISING or (self._state is _State.COMPUTING and self._work.last)

    @property
    def samples_so_far(self) -> int:
        """Samples of this rank in this round, including the current micro-batch."""
        return self.meter.round.samples + self._work.samples

    def expect_next(self) -> None:
        """Raise if the current micro-batch is not finished: then no other can begin."""
        if self._state in (_State.COMPUTING, _State.SYNCHRONISING):
            raise RoundStateError(
                f"the next batch was asked for before the last one was used. {self.agreement.remedies.unused}"
            )

    def begin(self, work: MicroBatch, input_s: float = 0.0) -> None:
        """Start computing a micro-batch, after ``input_s`` seconds of waiting for it."""
        self.expect_next()
        self._work = work
        self.gradient.begin(work, first=not self.meter.round.micro_batches)
        self._state = _State.COMPUTING
        self.meter.begin(input_s)
        self.meter.memory.begin(self.meter.learner.work_of(work))

    def weigh(self, weight: float) -> None:
        """Set the weight of the current micro-batch's gradient, where it is known only after the batch has begun."""
        self._work = replace(self._work, weight=weight)
        self.gradient.weigh(self._work)

    def pause(self) -> None:
        """End a micro-batch that is not the last of its round."""
        self._expect(_State.COMPUTING)
        self.meter.done(self._work.samples, self._work.gradient_weight, self._work.figures)
        self._state = _State.PAUSED

    def stop_early(self) -> bool:
        """Return whether the micro-batch just computed is the last, as another rank has finished or is about to."""
        if self._state is not _State.COMPUTING or self._work.last or self._work.plan.ends != "first":
            return False
        if self.signals is None:
            return False
        self.meter.catch_up()
        foreseen = not self.signals.raised(self.rounds)
        if foreseen:
            # On a device with a queue the clock does not show how far the work is, so there is no forecast.
            end, meter = self.planner.anticipation, self.meter
            if end is None or meter.queued:
                return False
            if not end.ends_before(meter.busy_s, meter.round.once_s, meter.round.micro_batches + 1):
                return False
        # The paper's rule: a rank that did part of its share also takes a smaller step.
        if self.policy.shrinks_early_steps:
            self.gradient.factor *= self.samples_so_far / self._work.plan.samples[self.rank]
        self._work = replace(self._work, last=True, foreseen=foreseen)
        return True

    def out_of_memory(self, *, memory_in_use: bool = False, again: bool = False) -> int:
        """Note that the current micro-batch does not fit, and return how large its parts may be.

        The next table shows the limit to every rank, and plans keep to it from then on. ``memory_in_use``: something
        else may still have held memory, so the failure says nothing about the size. ``again``: what the round had
        gathered is lost, so all of the round is done again.
        """
        self._expect(_State.COMPUTING)
        size = self._work.samples
        if size < 2:
            raise HeteroError(
                f"round {self.rounds}: rank {self.rank} has no memory for one sample; {self.agreement.remedies.memory}"
            )
        work = self.meter.learner.work_of(self._work) or size
        if again:
            self._reset_round()
        else:
            self._state = _State.PAUSED  # also of the first: the round goes on
        parts = max(int(self.meter.failed(math.ceil(work), memory_in_use=memory_in_use) * size / work), 1)
        logger.warning(
            "round %d: rank %d ran out of memory with %d samples; they are done in parts of at most %d, and its "
            "micro-batches hold at most %d from now on", self.rounds, self.rank, size, parts, self.meter.limit,
        )  # fmt: skip
        return parts

    def out_of_memory_error(self, when: str) -> HeteroError:
        """Return the error of this rank, which has run out of memory while its work cannot be done again."""
        round, line = self.rounds - (not self.in_round), self.meter.memory.fitted_line
        return HeteroError(
            f"round {round}: rank {self.rank} ran out of memory {when}; set max_micro_batch of the policy below "
            f"{self._work.samples}, or free memory{line and '. A micro-batch of x samples takes '}{line}"
        )

    def report(
        self,
        *,
        settings: float = 0.0,
        parameter_norm: float = 0.0,
        bits: float = 0.0,
        broken: float = 0.0,
        trained: int = 0,
        ended: bool = False,
        squares: tuple[float, float, float] = (0.0, 0.0, 0.0),
        dtype: npt.DTypeLike = np.float64,
    ) -> npt.NDArray[Any]:
        """Return this rank's contribution to the table, to be summed over all ranks; the last gradient is ready.

        ``broken`` is 1 if the gradient is not finite, ``trained`` a checksum of what is trained, and how; ``ended`` is
        True if data that this rank reads alone end with this round. ``squares`` is of an earlier round: the samples of
        this rank, and the squared norms of its mean gradient and of that of all ranks. They are 0 if they were not
        measured.
        """
        self._expect(_State.COMPUTING)
        work = self._work
        self.meter.done(work.samples, work.gradient_weight, work.figures)
        self._state = _State.SYNCHRONISING
        if work.plan.ends == "first" and self.signals is not None and not work.foreseen:
            # A rank that has only queued its work is not done.
            self.meter.catch_up()
            self.signals.raise_signal(self.rounds)
        # Fewer than planned, in a round that no rank ends early: the data of this rank have ended.
        fewer = (
            work.plan.ends == "all" and work.figures is None and self.meter.round.samples < work.plan.samples[self.rank]
        )
        self.meter.learn(short=fewer or self.planner.is_short(work.plan))
        return RoundReport(
            fingerprint=work.plan.fingerprint(work.data ^ trained),
            settings=settings,
            parameter_norm=parameter_norm,
            bits=bits,
            kernels=self.agreement.kernels,
            broken=broken,
            contents=work.contents,
            ended=float(ended),
            gradient_samples=squares[0],
            gradient_square=squares[1],
            mean_square=squares[2],
            **self.meter.row(),
        ).vector(self.rank, self.workers, dtype)

    def waiting(self) -> tuple[float, float]:
        """Do deferred work while the table travels; return the expected seconds of the wait, and of the transfer in it.

        Both are the last round's: the rank's own wait, and the shortest wait of any rank, who came last and waited for
        the transfer alone. NaN if there was no such round; the transfer is NaN, too, if layers waited in it.
        """
        self._expect(_State.SYNCHRONISING)
        self.meter.do_deferred_work()
        return self._wait_s

    def receive_table(self, summed: list[float] | npt.NDArray[Any]) -> None:
        """Take the table, which has arrived; raise on every rank if the ranks disagree about what must be equal."""
        self._expect(_State.SYNCHRONISING)
        self._table = RoundTable(summed, self.workers)
        self.agreement.require(self.rounds, self._table)

    def agree(self, summed: list[float] | npt.NDArray[Any] | None = None) -> float:
        """Decide the next plan, and return the factor for the summed gradient.

        All sums have arrived. ``summed`` is the table; None if ``receive_table`` has taken it.
        """
        self._expect(_State.SYNCHRONISING)
        now = self.meter.batch.clock()
        if summed is not None:
            self.receive_table(summed)
        assert self._table is not None, "receive_table() comes first"
        table, self._table = self._table, None
        # If layers exchanged, too, the table has one time for all transfers; the last one's own is not known.
        self._wait_s = now - self.meter.batch.done_at, math.nan if self.meter.round.held_s > 0 else table.transfer_s
        finished = FinishedRound(self.rounds, self._work.epoch, self._work.plan, table, now - self._agreed_at)
        self.planner.learn(finished)
        self.planner.count_update(table.total)
        self._notify(finished)
        self._agreed_at = now
        planned, weights = self.gradient.planned(self._work), table.column("weight")
        used = float(weights.sum())
        self.meter.end_round(now)
        self._use_learned_costs()
        self._state = _State.AGREED
        self.gradient.rescale = 1.0
        # By the weights of any rank, since all ranks must raise, or rescale, together.
        weighed = bool((weights != table.column("samples")).any())
        if not used and (weighed or self._work.weight is not None):
            raise ValueError(WEIGHS_NOTHING.format(finished.round))
        if weighed:
            self.gradient.of_sample = used / finished.plan.total
        return planned / used if used and not self.policy.shrinks_early_steps else 1.0

    # The noise of gradients (``hvd_hetero.measurement.gradient_noise``).

    def measures_noise(self, every: int) -> bool:
        """Return whether the squares of this round's gradients are taken, as those of one round of ``every``.

        Not where a gradient's size says how much a rank has done.
        """
        return self.workers > 1 and self.rounds % every == 0 and not self.policy.shrinks_early_steps

    def square_factors(self, correction: float) -> tuple[float, float, float]:
        """Return this rank's samples of the round just agreed, and what turns squares into those of mean gradients.

        Of its mean g_i, a rank has sent w_i g_i / X; the sums are corrected by X / W. So the first factor is for the
        square of what it has sent, the second for that of the sums. Where weights w_i are no samples, it counts as the
        samples that have the same share.
        """
        assert self.finished is not None, "the round has been agreed"
        table = self.finished.table
        weights = table.figures("weight")
        mine, whole = weights[self.rank], math.fsum(weights)
        samples, own = (mine * table.total / whole, correction * whole / mine) if mine else (0.0, 0.0)
        return samples, own**2, correction**2

    # Rounds whose tables come late (``hvd_hetero.late_tables``).

    def close_round(self) -> tuple[MicroBatch, bool]:
        """End the round at hand without a table; return its last micro-batch, and whether the round was a short one."""
        self._expect(_State.COMPUTING)
        self.meter.done(self._work.samples, self._work.gradient_weight, self._work.figures)
        short = self.planner.is_short(self._work.plan)
        self.planner.move_on()
        self._agreed_at = self.meter.batch.clock()
        self._state = _State.AGREED
        return self._work, short

    def agree_late(self, finished: FinishedRound, *, short: bool) -> None:
        """Decide the latest plan again, by a late table of finished rounds."""
        self.planner.revise(finished, short=short)
        self._notify(finished)
        self._use_learned_costs()

    def _notify(self, finished: FinishedRound) -> None:
        if self.planner.noise.rounds:
            finished = replace(finished, noise_scale=self.planner.noise.scale)
        self.finished = finished
        if self.next_round_over is not None:
            call, self.next_round_over = self.next_round_over, None
            call()
        if self.observer is not None:
            self.observer(finished)

    def _use_learned_costs(self) -> None:
        learner = self.meter.learner
        if learner.pace is not None and self.planner.fixed_costs is not None:
            learner.pace.set_fixed_cost(float(self.planner.fixed_costs.samples[self.rank]))
        costs, rule = learner.costs, self.planner.rule(self.planner.rounds_ahead)
        if costs is not None and self.finished is not None and rule != LENGTHS:
            costs.set_agreed_rule(
                rule, *(float(self.finished.table.column(name).sum()) for name in ("work", "samples"))
            )

    def require_finite(self) -> None:
        """Raise if some rank's gradient of the round just agreed is not finite: the update is about to be made."""
        assert self.finished is not None, "a round has been agreed"
        require_finite(self.finished.round, self.finished.table.column("broken"))

    def begin_anew(self) -> None:
        """Begin the training of another model, between two rounds: see ``Planner.begin_anew``."""
        self.discard_round()
        self.planner.begin_anew()

    def discard_round(self) -> None:
        """Forget the current round, which no synchronisation has seen; the next one uses its plan."""
        if self._state is _State.SYNCHRONISING:
            raise RoundStateError("a round that is being synchronised cannot be discarded; wait for its table first")
        self._reset_round()

    def state_dict(self) -> dict[str, Any]:
        """Return the plans, the policy's state, and what this rank has learned about itself; between rounds only."""
        self._expect(_State.AGREED)
        return {"version": _STATE_VERSION, **self.planner.state_dict(), "pace": self.meter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another job's state, of the same policy, ranks, global batch and rounds ahead."""
        self._expect(_State.AGREED)
        require_version(state, "the balance", _STATE_VERSION)
        self.planner.require_fitting(state)
        # First, because it may refuse: then the plans are as they were. Another card has other memory.
        other = {} if state["devices"] == self.planner.room.devices else {"memory": None}
        self.meter.load_state_dict({**state["pace"], **other})
        # Not in the state, since it must be the same on all ranks; the next table sets it.
        self.gradient.of_sample = 1.0
        self.planner.load_state_dict(state)

    # A change of membership, between two rounds.

    def resume(self, common: Mapping[str, Any], prospects: Sequence[tuple[float, int]], *, same_ranks: bool) -> bool:
        """Continue in a new membership, from a state that all ranks share; return whether its plans still hold.

        They do if ranks, policy and global batch are the same. Otherwise the policy divides anew by all ranks'
        ``prospects``: the speed that each expects (NaN: not known), and its largest micro-batch by memory (0: not
        known).
        """
        self._expect(_State.AGREED)
        require_version(common, "the balance", _STATE_VERSION)
        self.gradient.of_sample = 1.0
        if same_ranks:
            try:
                self.planner.load_state_dict(common)
            except ValueError as error:  # the policy or its options have changed
                logger.warning("the saved plans do not fit, and shares are divided anew: %s", error)
            else:
                return True
        speeds, limits = zip(*prospects, strict=True)
        self.planner.renegotiate(common, speeds, limits)
        return False

    def _expect(self, state: _State) -> None:
        if self._state is not state:
            raise RoundStateError(
                f"this call is for a rank {state.value}, and this rank is {self._state.value}; finish that first"
            )

    def _reset_round(self) -> None:
        self._state = _State.AGREED
        self.gradient.rescale = 1.0
        self.meter.forget()
