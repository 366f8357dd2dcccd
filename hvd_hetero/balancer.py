"""The state machine that an adapter drives: plan, compute, synchronise, agree.

            begin(micro-batch)            report()                agree(sum)
    AGREED ───────────────────▶ COMPUTING ─────────▶ SYNCHRONISING ─────────▶ AGREED
                                 │      ▲
                           pause()      begin(next micro-batch)
                                 ▼      │
                                 PAUSED ┘

One rank's balancer hears what the rank did and the table that all ranks share, and says what comes next. It moves no
tensor, calls no collective and owns no clock: the clock is handed to it, and the adapter carries the vectors.

**The gradient.** With n_j samples in micro-batch j of a rank, its mean gradient g_j, and X samples planned for the
round, the ranks sum ``Σ_j (n_j / X) g_j``, which is the mean gradient of all X samples, whatever the split. Inside a
rank the accumulator is kept in units of the present micro-batch, ``A_j = A_{j-1} · n_{j-1} / n_j + g_j``: the
frameworks accumulate g_j themselves, so nothing is to be done while the sizes are equal (``rescale == 1``), and one
factor ``weight = n_last / X`` follows at the end. Where the samples really used, S, are not the X planned, everybody
multiplies the sum by ``X / S`` afterwards; S is in the table.

**The lead.** A loader that prefetches must know plans early. With a lead of L rounds, the table of round r decides the
plan of round r + 1 + L; until the first table arrives, the policy's first plan holds. L must be the same on every rank.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_hetero.errors import PlanMismatchError, RoundStateError
from hvd_hetero.policies import Policy
from hvd_hetero.resources import ResourceMeter
from hvd_hetero.rounds import RoundPlan, RoundReport, RoundTable

__all__ = ["Balancer", "FinishedRound", "MicroBatch"]

# The first round of a job pays for buffers, kernels and caches that no later one pays for; its speed predicts nothing.
_WARM_UP_ROUNDS = 1

# How often drivers are read that serve nothing but the report.
_LEISURE_S = 1.0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What this rank is about to do."""

    plan: RoundPlan
    """of the whole round, shortened where an epoch ends"""
    samples: int
    last: bool = True
    """whether the synchronisation follows"""
    epoch: int = 0
    data: int = 0
    """checksum of the order of the data and the place in it"""


@dataclass(frozen=True, slots=True)
class FinishedRound:
    """What every rank knows once a round is agreed."""

    round: int
    epoch: int
    plan: RoundPlan
    table: RoundTable
    elapsed_s: float
    """since the round before was agreed, on this rank's clock"""


# What must be the same on all ranks, to what relative tolerance, and what it means if it is not. The last two have one
# because unlike processors round unlike; what they are to find, updates that differ, is far larger.
_MUST_AGREE = (
    (
        "fingerprint",
        0.0,
        "follow another plan or another order of the data than rank 0. Give all ranks the same policy, global_batch, "
        "dataset, seed, num_workers and prefetch_factor, and let them leave an epoch at the same round (stop_at of the "
        "loader)",
    ),
    (
        "settings",
        1e-5,
        "have other hyper-parameters (learning rate, momentum, …) than rank 0. The body of the loop runs once per "
        "micro-batch, and not at all on a rank without data: do what belongs to an update, such as scheduler.step(), "
        "in optimizer.register_step_post_hook(…), or once per epoch",
    ),
    (
        "witness",
        1e-3,
        "hold other parameters than rank 0. The body of the loop does not run on a rank without data: change "
        "gradients, as clipping does, in optimizer.register_step_pre_hook(…), and let all ranks change parameters "
        "alike",
    ),
)


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
        meter: ResourceMeter | None = None,
        observer: Callable[[FinishedRound], None] | None = None,
    ) -> None:
        if isinstance(global_batch, bool) or not isinstance(global_batch, int | np.integer):
            raise TypeError(f"global_batch must be an integer number of samples, got {global_batch!r}")
        if global_batch < workers:
            raise ValueError(
                f"global_batch must be at least the number of ranks, so that each holds a sample: got {global_batch} "
                f"for {workers} ranks; raise global_batch or launch fewer ranks"
            )
        self.policy = policy
        self.rank = rank
        self.workers = workers
        self.global_batch = int(global_batch)
        self.rounds = 0
        """rounds agreed so far"""
        self.lead = 0
        self._clock = clock
        self._meter = meter
        self.observer = observer
        self._predictor = policy.predictor()
        self._plans = deque([policy.first(workers, self.global_batch)])
        self._state = _State.AGREED
        self._work = MicroBatch(self._plans[0], 0)
        self._weight = 0.0
        self._wait_s = self._transfer_s = float("nan")
        self._apply_s = 0.0
        self._longest = 0
        self._cpu, self._memory = self._drivers()
        self._drivers_read_at = clock()
        self._agreed_at = clock()
        self._reset_round()

    def set_lead(self, rounds: int) -> None:
        """Fix plans this many rounds ahead. Before the first round only, and the same on every rank."""
        if rounds == self.lead:
            return
        if self.rounds or self.in_round:
            raise RoundStateError(
                f"plans are fixed {self.lead} rounds ahead since training began, and cannot be fixed {rounds} ahead "
                "now; give every loader of one LoadBalance the same num_workers and prefetch_factor"
            )
        self.lead = rounds
        self._plans = deque([self._plans[0]] * (rounds + 1))

    def plan(self, ahead: int = 0) -> RoundPlan:
        """The plan of the round that is ``ahead`` rounds after the present one (or the next, between rounds)."""
        if not 0 <= ahead <= self.lead:
            raise RoundStateError(f"plans are known up to {self.lead} rounds ahead, asked for {ahead}")
        return self._plans[ahead]

    # What the rank does.

    @property
    def in_round(self) -> bool:
        """Whether gradients of a round are being gathered."""
        return self._state is not _State.AGREED

    @property
    def between_updates(self) -> bool:
        """Whether gradients are still being gathered for an update: not during the last micro-batch, nor after it."""
        return self.in_round and not self.closing

    @property
    def accumulating(self) -> bool:
        """Whether the gradient of an earlier micro-batch of this round waits to be added to."""
        return self._micro_batches > 0 and self._state in (_State.PAUSED, _State.COMPUTING)

    @property
    def closing(self) -> bool:
        """Whether the micro-batch at work is the last of its round, so that the synchronisation follows."""
        return self._state is _State.SYNCHRONISING or (self._state is _State.COMPUTING and self._work.last)

    @property
    def rescale(self) -> float:
        """What to multiply the gradient accumulated so far by before this micro-batch adds to it."""
        return self._rescale

    @property
    def weight(self) -> float:
        """What to multiply the accumulated gradient by before it is summed over the ranks."""
        return self._weight

    def expect_next(self) -> None:
        """Raise if the micro-batch at hand is not finished, so that no other can begin."""
        if self._state in (_State.COMPUTING, _State.SYNCHRONISING):
            raise RoundStateError(
                "the next batch was asked for before the last one was used: call optimizer.step() once for every "
                "batch, also for one that you would rather skip; to accumulate, set max_micro_batch of the policy"
            )

    def begin(self, work: MicroBatch, input_s: float = 0.0) -> None:
        """A micro-batch is at hand after ``input_s`` seconds of waiting for it; computing starts now."""
        self.expect_next()
        self._rescale = self._work.samples / work.samples if self._state is _State.PAUSED else 1.0
        self._work = work
        self._weight = work.samples / work.plan.total  # once a round: it is asked for with every tensor
        self._input_s += input_s
        self._state = _State.COMPUTING
        self._began_at = self._clock()

    def pause(self) -> None:
        """A micro-batch is done and is not the last of its round."""
        self._expect(_State.COMPUTING)
        self._close_micro_batch()
        self._state = _State.PAUSED

    def report(self, *, settings: float = 0.0, witness: float = 0.0) -> npt.NDArray[np.float64]:
        """The last gradient is ready: this rank's contribution to the table, to be summed over all ranks."""
        self._expect(_State.COMPUTING)
        self._close_micro_batch()
        self._state = _State.SYNCHRONISING
        compute_s = self._compute_s + self._apply_s
        busy_s = compute_s + self._input_s
        # A short round tells more of the fixed cost than of the speed.
        self._longest = max(self._longest, self._work.plan.total)
        whole = self._work.plan.total == self._longest
        if self._samples and busy_s > 0 and whole and self.rounds >= _WARM_UP_ROUNDS:
            self._predictor.update(self._samples / busy_s, cpu=self._cpu, memory=self._memory)
        # A speed goes with the drivers read before its round, a prediction with those of now (lb-bsp, Eq. 4). Reading
        # them takes most of a millisecond, for which everybody would wait: who does not use them reads them later.
        if self._predictor.uses_drivers:
            self._cpu, self._memory = self._drivers()
        return RoundReport(
            samples=self._samples,
            micro_batches=self._micro_batches,
            compute_s=compute_s,
            input_s=self._input_s,
            wait_s=self._wait_s,
            samples_per_s=self._predictor.predict(cpu=self._cpu, memory=self._memory),
            cpu=self._cpu,
            memory=self._memory,
            fingerprint=self._work.plan.fingerprint(self._work.data),
            settings=settings,
            witness=witness,
        ).vector(self.rank, self.workers)

    def waiting(self) -> tuple[float, float]:
        """The table has left, and there is time. Returns the seconds that the wait and the transfer in it will take.

        The estimate is the last round's: the rank's own wait, and the shortest wait of any rank, since the last to come
        waits only for the transfer. NaN where there was no such round.
        """
        self._expect(_State.SYNCHRONISING)
        if not self._predictor.uses_drivers and self._reported_at - self._drivers_read_at > _LEISURE_S:
            self._drivers_read_at = self._reported_at
            self._cpu, self._memory = self._drivers()
        return self._wait_s, self._transfer_s

    def agree(self, summed: npt.ArrayLike) -> float:
        """The sum has arrived: decide the next plan. Returns what to multiply the summed gradient by."""
        self._expect(_State.SYNCHRONISING)
        now = self._clock()
        table = RoundTable(summed, self.workers)
        self._compare(table)
        self._wait_s = now - self._reported_at
        self._transfer_s = float(table.column("wait_s").min())  # NaN, if that of any rank is
        self._plans.append(self.policy.next(self._plans[-1], table))
        self._plans.popleft()
        if self.observer is not None:
            elapsed_s = now - self._agreed_at
            self.observer(FinishedRound(self.rounds, self._work.epoch, self._work.plan, table, elapsed_s))
        self.rounds += 1
        self._agreed_at = now
        planned, used = self._work.plan.total, table.total
        self._reset_round()
        return planned / used if used else 1.0

    def applied(self, seconds: float) -> None:
        """The optimizer's update took this long: it delays the next round's gradient, so it counts as its work."""
        self._apply_s = seconds

    def abandon(self) -> None:
        """Forget the round at hand, which no synchronisation has seen; its plan is used for the next one."""
        if self._state is _State.SYNCHRONISING:
            raise RoundStateError("a round that is being synchronised cannot be abandoned")
        self._reset_round()

    def _compare(self, table: RoundTable) -> None:
        if table.unanimous:
            return
        for name, tolerance, meaning in _MUST_AGREE:
            if ranks := table.disagreement(name, tolerance):
                raise PlanMismatchError(f"round {self.rounds}: ranks {ranks} {meaning}")

    def _expect(self, state: _State) -> None:
        if self._state is not state:
            raise RoundStateError(f"expected to be {state.value}, but this rank is {self._state.value}")

    def _close_micro_batch(self) -> None:
        self._reported_at = self._clock()
        self._compute_s += self._reported_at - self._began_at
        self._samples += self._work.samples
        self._micro_batches += 1 if self._work.samples else 0

    def _reset_round(self) -> None:
        self._state = _State.AGREED
        self._samples = 0
        self._micro_batches = 0
        self._compute_s = 0.0
        self._input_s = 0.0
        self._rescale = 1.0

    def _drivers(self) -> tuple[float, float]:
        if self._meter is None:
            return float("nan"), float("nan")
        reading = self._meter.read()
        return reading.cpu, reading.memory
