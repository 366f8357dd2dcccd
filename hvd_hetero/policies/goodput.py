r"""Chooses the global batch: statistical efficiency times throughput.

With the noise scale φ (``measurement.gradient_noise``), a step with B samples advances as much as r steps with B₀,

    r(B) = (φ/B₀ + 1) / (φ/B + 1) = B/B₀ · (φ + B₀) / (φ + B),

which is 1 for B₀, at most B/B₀, and AdaScale's gain. With T(B) the time of the best round of B samples, by the ranks'
measured costs and the transfer, ``r(B) / T(B)`` is the progress per second: the goodput. Where T = c + B/V, it is
greatest at B = √(φ c V).

**The learning rate** belongs to B₀. "adascale" multiplies it by r in each update. "square-root" takes √r, which suits
optimizers that divide by a gradient's size (Adam), and "constant" leaves it alone. A schedule goes by the progress Σ r,
which counts steps of B₀.

Differences from AdaScale (Johnson et al., 2020): noise from unequal batches, over the averages of the noise; gains also
below 1. From Pollux (Qiao et al., 2021): T from costs per rank and their best split, and no search over batch and
accumulation together, since micro-batches follow from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np

from hvd_hetero.checks import integer
from hvd_hetero.kept import Figure, Kept
from hvd_hetero.measurement.gradient_noise import GradientNoise
from hvd_hetero.policies.affine_shares import AffineCosts
from hvd_hetero.policies.gamma_shares import relaxed_seconds
from hvd_hetero.policies.policy import Policy
from hvd_hetero.prediction.ema import EMA
from hvd_hetero.rounds import RoundPlan, RoundTable

LearningRate = Literal["adascale", "square-root", "constant"]

# Arbitrary: the noise that decides is an average of at least as many rounds.
_ROUNDS_PER_DECISION = 16


class Goodput(Kept):
    """A global batch that adapts: ``LoadBalance(global_batch=Goodput(start=256, least=64, most=4096))``.

    Parameters
    ----------
    start
        B₀: samples of the first rounds, which the learning rate is for.
    least, most
        The smallest and the largest batch that may be chosen.
    learning_rate
        "adascale": the optimizer's learning rate, times the gain r, in every update. "square-root": times √r, for Adam
        and its like. "constant": as it is.
    """

    KEPT = (Figure("progress"), Figure("_waited", whole=True))
    PARTS = ("_transfer",)

    def __init__(self, *, start: int, least: int, most: int, learning_rate: LearningRate = "adascale") -> None:
        remedy = "give a whole number of samples over all ranks"
        self.start = integer("start", start, 1, remedy=remedy)
        self.least = integer("least", least, 1, remedy=remedy)
        self.most = integer("most", most, 1, remedy=remedy)
        if not self.least <= self.start <= self.most:
            raise ValueError(
                f"start must be between least and most, got least={least}, start={start}, most={most}; give the batch "
                "that the learning rate is for as start"
            )
        if learning_rate not in get_args(LearningRate):
            raise ValueError(
                f"learning_rate must be one of {', '.join(map(repr, get_args(LearningRate)))}, got {learning_rate!r}; "
                "use 'adascale' for SGD and 'square-root' for Adam"
            )
        self.learning_rate = learning_rate
        self.progress = 0.0
        """Steps of the first batch that the updates so far were worth: Σ r. Of a training: ``LoadBalance.progress``."""
        self.fits = math.inf
        """The largest batch that memory holds, by what is said and learned."""
        self._sizes: tuple[int, ...] = (self.start,)
        self._waited = 0
        self._transfer = EMA()

    def begin(self, policy: Policy, workers: int) -> None:
        """Begin a training by this policy; raise if it cannot divide batches of these sizes among so many ranks."""
        self.progress, self._waited, self._transfer = 0.0, 0, EMA()
        if not (policy.shares_alone and policy.keeps_total):
            raise ValueError(
                f"global_batch=Goodput(…) needs a policy that decides shares alone, and {policy.name!r} decides more; "
                "use 'lb-bsp', 'bsp' or StaticAllocation, or a global_batch that stays"
            )
        self._sizes = sizes(self.least, self.start, self.most, policy.multiple_of)
        for total in {self._sizes[0], self._sizes[-1]}:
            policy.first(workers, total)  # raises if no split of so many samples keeps its bounds

    def reconsider(
        self, policy: Policy, plan: RoundPlan, table: RoundTable, noise: GradientNoise, typical_size: float
    ) -> RoundPlan:
        """Return the plan for rounds of the best size, after one more round: in most cases the same."""
        self._transfer.update(table.transfer_s)  # the last to come waits for the transfer alone
        self._waited += 1
        if plan.total > self.fits:  # another tenant of a card, perhaps
            held = [size for size in self._sizes if size <= self.fits]
            return policy.resized(plan, max(held, default=self._sizes[0]))
        if self._waited < _ROUNDS_PER_DECISION or not noise.known:
            return plan
        self._waited = 0
        limits, transfer_s = table.column("limit"), self._transfer.predict()
        transfer_s = transfer_s if transfer_s > 0.0 else 0.0  # NaN where layers waited for each other

        def resized(total: int) -> RoundPlan:
            return policy.resized(plan, total).within(limits)

        total = self.chosen(
            plan.total,
            noise.scale_between,
            lambda total: (
                transfer_s + round_s(policy, plan if total == plan.total else resized(total), table, typical_size)
            ),
        )
        return plan if total == plan.total else resized(total)

    def chosen(self, total: int, between: tuple[float, float], seconds: Callable[[int], float]) -> int:
        """Return the best size by the ends of φ and the seconds of a round of each size, or the present ``total``."""
        low, high = between
        # A move must pay by more than 3 %, and at most doubles the batch (both arbitrary). Every operation is correctly
        # rounded, so all ranks decide alike.
        now_s, best, most = seconds(total), total, 1.03
        for other in self._sizes:
            if other == total or other > 2 * total or (other > total and other > self.fits):
                continue
            # r favours larger batches the more, the larger φ is: each direction is judged by the end against it.
            scale = low if other > total else high
            better = gain(other, self.start, scale) / gain(total, self.start, scale) * (now_s / seconds(other))
            if better > most:  # False for NaN: a time that is not known
                best, most = other, better
        return best

    def advance(self, samples: int, noise: GradientNoise) -> float:
        """Count an update with so many samples, and return the factor of its learning rate."""
        scale = noise.scale
        worth = 1.0 if math.isnan(scale) else gain(samples, self.start, scale)
        self.progress += worth
        return {"adascale": worth, "square-root": math.sqrt(worth), "constant": 1.0}[self.learning_rate]

    def nearest(self, total: int) -> int:
        """Return the size that is nearest to a former one: another membership may have chosen among others."""
        return min(self._sizes, key=lambda size: abs(size - total))


def gain(samples: int, start: int, scale: float) -> float:
    """Return r: how many steps of ``start`` samples one step is worth, at this noise scale."""
    if scale == math.inf:
        return samples / start
    return (scale / start + 1.0) / (scale / samples + 1.0) if samples else 0.0


def round_s(policy: Policy, plan: RoundPlan, table: RoundTable, typical_size: float) -> float:
    """Return the seconds of a round of this plan's total without the transfer; NaN: not known.

    The ranks' costs divide the samples, if the policy goes by them, or the plan does. ``typical_size`` is that of the
    micro-batches that the table's speeds are for.
    """
    if (table.column("slope_s") > 0.0).all():  # of devices, whose curves are known
        return relaxed_seconds(table, plan.total)
    speeds, fixed = table.column("samples_per_s"), table.column("fixed_samples")
    # Before fixed costs are known, the time is taken to be half fixed at the first batch, the mean of what is likely
    # then (`measurement.fixed_cost`). The move that follows shows how much it is.
    if not fixed.any():
        fixed = np.full(len(fixed), typical_size)
    costs = AffineCosts(speeds, fixed, typical_size, policy.minimum, policy.multiple_of)
    return costs.round_s(plan, divided=policy.measures)


def sizes(least: int, start: int, most: int, multiple_of: int = 1) -> tuple[int, ...]:
    """Return the batches that may be chosen: 2^k and 3·2^k units, the bounds and the start.

    The unit is ``multiple_of``. Bounds that are no multiple of it are left out: the sizes next to them will do.
    """
    # The ratios of the sizes are 4/3 and 3/2. So where T is a line, the best of them is within 1 % of the best batch:
    # the goodput over its maximum is at least (2 + 2) / (2 + ρ + 1/ρ) for a batch that is ρ <= √1.5 times too large or
    # small.
    rungs = {start}
    rungs.update(bound for bound in (least, most) if bound % multiple_of == 0)
    unit = multiple_of
    while unit <= most:
        rungs.update(size for size in (unit, 3 * unit) if least <= size <= most)
        unit *= 2
    return tuple(sorted(rungs))
