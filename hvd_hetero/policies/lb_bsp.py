"""LB-BSP: batches by predicted speeds, so that all ranks finish together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from hvd_hetero.allocation.largest_remainder import proportional
from hvd_hetero.bounds import Said
from hvd_hetero.checks import integer
from hvd_hetero.policies.affine_shares import AffineCosts, Floats
from hvd_hetero.policies.evidence import Evidence
from hvd_hetero.policies.policy import Policy, checked_micro_batch, checked_tolerance
from hvd_hetero.policies.resting import Resting
from hvd_hetero.prediction.base import Predictor
from hvd_hetero.prediction.predictor_names import predictor
from hvd_hetero.rounds import FinishedRound, RoundPlan

if TYPE_CHECKING:
    from hvd_hetero.measurement.device_profile import DeviceProfile
    from hvd_hetero.policies.device_shares import DeviceShares

_RETURNS_BELOW = 2 / 3  # of the tolerance equal shares return; at all of it, noise would switch to and fro
_PART_BY_COST = 0.25  # of the tolerance: at all of it, shares of 44 and 20 stayed at speeds 1 and 1/2, which wait 4.5 %
_DEPARTURE_PER_GAIN = 8.0  # of an equal share, for a round that is saved; where b = 0, 1 would do
_TAKEN_BACK_BEYOND = 1.5  # times that, arbitrary; at 1, a split would follow every forecast of the gain


class LBBSP(Policy):
    r"""Load-balanced BSP for processors whose time is a line in the batch (lb-bsp, section 3.2).

    Minimise the latest rank, ``max_i (x_i + k_i β_i) / u_i``, over integers with ``sum x_i = X``, at least ``minimum``
    each (Eq. 3 with Γ(x) = (x + β) / u). Over the reals, ``x_i = u_i T - k_i β_i`` with the T that makes the sum X. The
    pace ``u_i`` is what rank i predicts from its own history, in samples and fixed samples per second; β_i
    is what one of its k_i micro-batches costs besides its samples (``measurement.fixed_cost``), 0 until that is known.
    With β = 0 this is the paper's division in proportion to speeds.

    **How far a split goes.** Where b dominates in t = m x + b, times hardly follow the shares. Then noise alone would
    lead equal ranks to shares of one sample. So a split must earn its departure from equal shares:

    - It is taken if it saves more than ``tolerance``, and more than the ranks' forecasts may be wrong.
    - No rank gives away more of its equal share than eight times what that saves of a round, in however many steps.
    - A micro-batch is at most a third, or a step, beyond the sizes that were measured (``policies.evidence``).

    Differences from the paper: no manager process; the fixed cost; the integers are the exact optimum (the paper leaves
    rounding open); the tolerance; a rank without a usable prediction keeps its share, and the others divide the rest.

    Parameters
    ----------
    predictor
        The name of a predictor, or an object; every rank is a process and has its own. With
        ``Mixture(drivers=True)`` each rank reads its available CPU before every round, and the plan follows a change
        in its first round; if plans are fixed some rounds ahead (``num_workers`` of the
        loader, ``prefetch`` in Keras), it comes as many rounds later.
    minimum, multiple_of
        Every rank's share is at least ``minimum`` samples and a multiple of ``multiple_of``.
    tolerance
        A new split is taken only if some rank is later than the best split by more than this share of its time.
        Otherwise the batches of equal machines would follow every fluctuation, and each new batch size
        costs something: new buffers, new kernels, and sizes that kernels like less (on equal ranks, batches of 65 and
        63 instead of 64 and 64 made a step of 80 ms 2 % longer). For the same reasons the equal split,
        whose size the user chose, is taken again as soon as no other is sooner by two thirds of the tolerance. The
        values are arbitrary between the noise of a predicted speed and a loss that one would notice. With 0, every
        prediction is followed as it is, however far.
    max_micro_batch
        What memory holds: a number of samples; a list with one bound for each rank; or a dict,
        ``{"NVIDIA GeForce RTX 3060": 24}``, with one for each name of a device that has one (PyTorch's
        ``torch.cuda.get_device_name()``). Larger shares are done in several micro-batches; beside a reducer of your own
        they are cut, and other ranks take the rest (docs/memory.md).
    may_rest
        True: a rank that costs more than it gives, even with its least share, does no samples; it takes part in the
        sums, and is tried again from time to time (``policies.resting``). With ``DistributedOptimizer``, or in Keras.
    device
        "cpu": as above. "gpu": devices that saturate and run out of memory, where the time of a batch is a curve and
        not a line through the origin. The first rounds climb a ladder of batch sizes to learn each curve Γ, with the
        global batch kept (``policies.device_shares``); from then on the split is the exact optimum of Eq. 3 with the
        bounds of Eq. 5 (section 3.3; ``policies.gamma_shares``), and follows devices that slow down. Shares grow until
        something does not fit, so let the loop survive that: ``docs/gpu.md``.
    """

    name: ClassVar[str] = "lb-bsp"
    shares_alone: ClassVar[bool] = True
    PARTS = ("_curves", "_evidence", "_resting")

    def __init__(
        self,
        predictor: str | Predictor = "mixture",
        *,
        minimum: int = 1,
        multiple_of: int = 1,
        tolerance: float = 0.03,
        max_micro_batch: Said = None,
        may_rest: bool = False,
        device: Literal["cpu", "gpu"] = "cpu",
    ) -> None:
        if device not in ("cpu", "gpu"):
            raise ValueError(
                f"device must be 'cpu' or 'gpu', got {device!r}; use 'gpu' for what saturates and runs out of memory"
            )
        self.device = device
        samples = "give a whole number of samples"
        self.minimum = integer("minimum", minimum, 1, remedy=f"{samples}; with 1 every rank's speed stays known")
        self.multiple_of = integer("multiple_of", multiple_of, 1, remedy=f"{samples}; 1 asks for no multiple")
        self._least = -(-self.minimum // self.multiple_of) * self.multiple_of
        self._tolerance = self.tolerance = checked_tolerance(tolerance)
        self.max_micro_batch = checked_micro_batch(max_micro_batch)
        self._predictor = predictor
        self._equal = RoundPlan((), ())
        self._typical_size = 0.0
        self._curves: DeviceShares | None = None
        self._evidence: Evidence | None = None
        self.weighs_fixed_cost = device == "cpu"
        self.may_rest = may_rest
        if may_rest and device == "gpu":
            raise ValueError(
                "may_rest is for device='cpu', got 'gpu', whose curves need shares to be known; leave it out"
            )
        self._resting: Resting | None = None
        if device == "gpu":
            from hvd_hetero.policies.device_shares import DeviceShares

            self._curves = DeviceShares(minimum=self.minimum, multiple_of=self.multiple_of, tolerance=self.tolerance)
        self.predictor()  # a wrong name is an error here and not in the first round

    @property
    def accumulates(self) -> bool:
        """True if a rank may do several micro-batches: also on a GPU, whose memory limit is found out."""
        return self.device == "gpu" or super().accumulates

    def predictor(self) -> Predictor:
        """Return the chosen predictor: a new one by name, or the very object that was given."""
        return predictor(self._predictor)

    def profile(self) -> DeviceProfile | None:
        """Return a new curve of one device, for devices that have one."""
        return None if self._curves is None else self._curves.profile()

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Return equal shares, until speeds are known."""
        self._check_divisible(workers, global_batch)
        if self._curves is not None:
            self._curves.restart()
        self._equal, self._evidence = self._equally(workers, global_batch), None
        self._typical_size = self._equal.typical_size
        if self.may_rest:
            self._resting = Resting(self._typical_size, self._least, self.multiple_of)
        return self._equal

    def resized(self, plan: RoundPlan, total: int) -> RoundPlan:
        """Return the same proportions; what was learned goes on to hold."""
        least = np.where(plan.shares > 0, self.minimum, 0)  # what rests goes on to rest
        return RoundPlan.of(proportional(plan.samples, total, minimum=least, multiple_of=self.multiple_of))

    def _equally(self, workers: int, total: int) -> RoundPlan:
        shares = proportional(np.ones(workers), total, minimum=self.minimum, multiple_of=self.multiple_of)
        return RoundPlan.of(shares, self.max_micro_batch)

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        """Return the best shares for the ranks' costs, or by the curves, if they are worth a change."""
        table = finished.table
        if self._curves is not None and not self._curves.given_up and table.workers > 1:
            by_curves = self._curves.next(plan, finished)
            return plan if by_curves is None else RoundPlan.of(by_curves)
        if self._evidence is None:
            self._evidence = self._no_evidence()
        self._evidence.learn(table)
        # Divided by cost, batches have other sizes in each round anyway, so a new split costs little.
        self._tolerance = self.tolerance * (_PART_BY_COST if table.column("work").any() else 1.0)
        speeds, fixed, limits = (table.column(name) for name in ("samples_per_s", "fixed_samples", "limit"))
        if self._resting is None:
            return self._worthwhile(plan, speeds, fixed, limits)
        rest = self._resting.decide(plan.total, speeds, fixed, table.column("timed_samples") > 0.0)
        return self._with_rests(plan, rest, self._resting.due(), speeds, fixed, limits)

    def _with_rests(
        self, plan: RoundPlan, rest: list[int], tried: int | None, speeds: Floats, fixed: Floats, limits: Floats
    ) -> RoundPlan:
        """Return the best plan in which these ranks rest, but for one that may be tried with its least share."""
        speeds, awake = speeds.copy(), np.ones(plan.workers, dtype=np.bool_)
        speeds[rest], awake[rest] = math.nan, False
        if ((plan.shares > 0) != awake).any():
            wanted = np.where(awake, np.maximum(plan.shares, self._least), 0)
            least = np.where(awake, self._least, 0)
            plan = self._cut(proportional(wanted, plan.total, minimum=least, multiple_of=self.multiple_of), limits)
        plan = self._worthwhile(plan, speeds, fixed, limits)
        if tried is None or plan.shares.max() < 2 * self._least:
            return plan
        shares = plan.shares.copy()
        shares[tried] = self._least
        shares[shares.argmax()] -= self._least
        return self._cut(shares, limits)

    def renegotiate(self, plan: RoundPlan, speeds: Sequence[float]) -> RoundPlan:
        """Return shares by the known speeds; a rank that does not know its own takes an equal one."""
        if self._curves is not None:
            return plan
        nothing = np.zeros(len(speeds))
        return self._worthwhile(plan, np.array(speeds, dtype=np.float64), nothing, nothing)

    def _worthwhile(self, plan: RoundPlan, speeds: Floats, fixed: Floats, limits: Floats) -> RoundPlan:
        """Return the best plan as far as it is worth a change, or the equal one if that is as good."""
        if plan.total != self._equal.total:
            self._equal = self._equally(plan.workers, plan.total)
        costs = AffineCosts(speeds, fixed, self._typical_size, self._least, self.multiple_of)
        if not costs.all_known or self._tolerance == 0.0 or self._evidence is None:
            wanted = costs.divided(plan, limits)
            return wanted if costs.latest_s(wanted) < costs.latest_s(plan) * (1.0 - self._tolerance) else plan
        equal, trusted_part = self._equal.within(limits), self._evidence.trusted_part(fixed)
        if plan.samples == equal.samples:
            if costs.near_best(equal, self._tolerance, trusted_part):
                return plan
        elif costs.near_best(equal, _RETURNS_BELOW * self._tolerance):
            return equal
        too_far = _departure(plan, equal) > _TAKEN_BACK_BEYOND * _DEPARTURE_PER_GAIN * costs.gain(equal)
        if not too_far and costs.near_best(plan, self._tolerance, trusted_part):
            return plan
        wanted = costs.divided(plan, limits)
        worth = _DEPARTURE_PER_GAIN * costs.gain(equal, trusted_part)
        if (departs := _departure(wanted, equal)) > worth:
            wanted = self._cut(costs.between(equal, wanted, worth / departs), limits)
        if not too_far and costs.latest_s(wanted) >= costs.latest_s(plan, trusted_part) * (1.0 - self._tolerance):
            return plan
        part = self._evidence.allowed_part(plan, wanted)
        return wanted if part == 1.0 else self._cut(costs.between(plan, wanted, part), limits)

    def _cut(self, shares: npt.NDArray[np.int64], limits: Floats) -> RoundPlan:
        return RoundPlan.of(shares).within(limits)

    def _no_evidence(self) -> Evidence:
        return Evidence(self._equal.workers, self._typical_size, self.multiple_of)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what is known of the ranks' curves, and of how far their figures can be trusted."""
        if (state["curves"] is None) != (self._curves is None):
            raise ValueError(
                f"the state is of LBBSP with another device than {self.device!r}; resume with the same, or begin again "
                "with the model's parameters alone"
            )
        self._evidence = None if state["evidence"] is None else self._no_evidence()
        super().load_state_dict(state)

    def _check_divisible(self, workers: int, global_batch: int) -> None:
        """Raise if the global batch cannot be divided as asked; here, because the user set no ``total``."""
        multiple, share = self.multiple_of, self._least
        if global_batch < workers * share:
            asked = f"minimum={self.minimum}" + (f" and multiple_of={multiple}" if multiple > 1 else "")
            smaller = [name for name in ("minimum", "multiple_of") if getattr(self, name) > 1]
            raise ValueError(
                f"global_batch must be at least {workers * share} for {workers} ranks with {asked}, so that every "
                f"rank holds {share} samples; got global_batch={global_batch}: raise global_batch"
                f"{''.join(f', lower {name}' for name in smaller)}, or launch fewer ranks"
            )
        if global_batch % multiple:
            below = global_batch - global_batch % multiple
            near = [size for size in (below, below + multiple) if size >= workers * share]
            raise ValueError(
                f"global_batch must be a multiple of multiple_of={multiple}, so that the shares of {workers} ranks "
                f"with minimum={self.minimum} can be; got global_batch={global_batch}: use global_batch="
                f"{' or '.join(map(str, near))}, or multiple_of=1"
            )


def _departure(plan: RoundPlan, equal: RoundPlan) -> float:
    """Return the largest part of its equal share that a rank gives away."""
    return float(((equal.shares - plan.shares) / equal.shares).max())
