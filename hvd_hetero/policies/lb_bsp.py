"""LB-BSP: batches in proportion to predicted speeds, so that all ranks finish at the same moment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_hetero.allocation import proportional
from hvd_hetero.allocation._checks import integer
from hvd_hetero.allocation.device import DeviceProfile
from hvd_hetero.policies.base import Policy, checked_micro_batch, checked_tolerance, comparable_speeds
from hvd_hetero.policies.device_shares import LADDER_STEPS, DeviceShares
from hvd_hetero.prediction import Predictor, Steady, predictor
from hvd_hetero.rounds import FEW_RANKS, FinishedRound, RoundPlan

__all__ = ["LBBSP"]

_Numbers: TypeAlias = Sequence[float] | npt.NDArray[Any]

_BACK = 2 / 3  # of the tolerance, within which the equal split is taken again: not all, or noise would lead to and fro


class LBBSP(Policy):
    r"""Load-balanced BSP for processors whose time is proportional to the batch (lb-bsp, section 3.2).

    Minimise the latest rank, ``max_i x_i / v_i``, over integers with ``sum x_i = X`` (Eq. 3 with Γ(x) = x / v). Over
    the reals the optimum is ``x_i = X v_i / sum v``; the integers are the nearest by largest remainder, at least
    ``minimum`` each. The speed ``v_i`` is what rank i predicts for itself from its own history.

    A fixed cost per round does no harm: if a round really takes ``m_i x_i + b_i``, the measured speed is
    ``x_i / (m_i x_i + b_i)``, and x proportional to it repeats itself exactly where all times are equal.

    Parameters
    ----------
    predictor
        The name of a predictor, or an object; every rank is a process of its own and has its own. With
        ``Mixture(drivers=True)`` the CPU and memory that are available are read before every round, and a change that
        they tell is in the plan of its first round; where plans are fixed some rounds ahead (``num_workers`` of the
        loader, ``prefetch`` in Keras), it comes as many rounds later.
    minimum, multiple_of
        Every rank's share is at least ``minimum`` samples and a multiple of ``multiple_of``.
    tolerance
        A new split is taken only if some rank is later than the best split by more than this share of its time, and
        by more than the share by which its speed is uncertain (``prediction.steady``); then it is the best one.
        Otherwise the batches of equal machines would follow every breath of the measurement, and each new batch size
        costs something: new buffers, new kernels, and sizes that kernels like less (on equal ranks, batches of 65 and
        63 instead of 64 and 64 made a step of 80 ms two hundredths longer). For the same reasons the equal split,
        whose size the user chose, is taken again as soon as no other is sooner by two thirds of the tolerance. The
        values are arbitrary between the noise of a predicted speed and a loss that one would notice. With 0, every
        prediction is followed as it is.
    max_micro_batch
        Larger shares are done in several micro-batches, for memory's sake.
    device
        "cpu": as above. "gpu": devices that saturate and run out of memory, where the time of a batch is a curve and
        not a line through the origin. The first rounds climb a ladder of batch sizes to learn each curve Γ, with the
        global batch kept (``policies.device_shares``); from then on the split is the exact optimum of Eq. 3 with the
        bounds of Eq. 5 (section 3.3; ``policies.gamma_shares``), and follows devices that slow down. Shares grow until
        something does not fit, so let the loop survive that: ``docs/gpu.md``.

    Differences from the paper: no manager process; the largest-remainder rounding (the paper leaves rounding open); the
    tolerance, and the averages where averages forecast as well; a rank without a usable prediction keeps its share,
    and the others divide the rest.
    """

    name: ClassVar[str] = "lb-bsp"

    def __init__(
        self,
        predictor: str | Predictor = "mixture",
        *,
        minimum: int = 1,
        multiple_of: int = 1,
        tolerance: float = 0.03,
        max_micro_batch: int | None = None,
        device: Literal["cpu", "gpu"] = "cpu",
    ) -> None:
        if device not in ("cpu", "gpu"):
            raise ValueError(
                f"device must be 'cpu' or 'gpu', got {device!r}; use 'gpu' for what saturates and runs out of memory"
            )
        self.device = device
        samples = "give a whole number of samples"
        self.minimum = integer("minimum", minimum, 1, way_out=f"{samples}; with 1 every rank's speed stays known")
        self.multiple_of = integer("multiple_of", multiple_of, 1, way_out=f"{samples}; 1 asks for no multiple")
        self.tolerance = checked_tolerance(tolerance)
        self.max_micro_batch = checked_micro_batch(max_micro_batch)
        self._predictor = predictor
        self._equal, self._equal_shares = RoundPlan((), ()), _numbers(())
        self._curves = None
        if device == "gpu":
            self._curves = DeviceShares(
                minimum=self.minimum,
                multiple_of=self.multiple_of,
                tolerance=self.tolerance,
                max_micro_batch=self.max_micro_batch,
            )
        self.predictor()  # a wrong name is an error here and not in the first round

    def predictor(self) -> Predictor:
        """The predictor asked for: a fresh one by name, or the very object that was given."""
        return predictor(self._predictor)

    def forecaster(self, predictor: Predictor) -> Predictor:
        """Calm where speeds only scatter, unless every prediction is to be followed."""
        return Steady(predictor) if self.tolerance > 0 and self._curves is None else predictor

    def profile(self) -> DeviceProfile | None:
        """The curve of one device, on devices that have one."""
        return None if self._curves is None else DeviceProfile(enough=LADDER_STEPS - 2)

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Equal shares, until speeds are known."""
        self._check_divisible(workers, global_batch)
        if self._curves is not None:
            self._curves.restart()
        shares = proportional(np.ones(workers), global_batch, minimum=self.minimum, multiple_of=self.multiple_of)
        self._equal = RoundPlan.of(shares, self.max_micro_batch)
        self._equal_shares = _numbers(self._equal.samples)
        return self._equal

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        """Shares in proportion to the predicted speeds, or by the curves, where that is worth a change."""
        table = finished.table
        if self._curves is not None and not self._curves.given_up and table.workers > 1:
            by_curves = self._curves.next(plan, finished)
            return plan if by_curves is None else RoundPlan.of(by_curves, self.max_micro_batch)
        read = table.figures if table.workers <= FEW_RANKS else table.column
        told, doubts = _Told(read("samples_per_s")), read("uncertainty")
        if plan.samples != self._equal.samples and told.near_best(self._equal_shares, _BACK * self.tolerance):
            return self._equal
        held = _numbers(plan.samples)
        if told.near_best(held, self.tolerance, doubts):
            return plan
        shares, uncertain, speeds = np.asarray(held), np.asarray(doubts), told.comparable
        known = speeds > 0
        if known.sum() < 2:
            return plan
        wanted = self._divided(shares, speeds)
        if not self._worthwhile(shares[known], wanted[known], speeds[known], uncertain[known]):
            return plan
        return RoundPlan.of(wanted, self.max_micro_batch)

    def renegotiate(self, plan: RoundPlan, speeds: Sequence[float]) -> RoundPlan:
        """Shares by the speeds that are known; a rank that does not know its own takes an equal one."""
        told, held = _Told(_numbers(speeds)), _numbers(plan.samples)
        if self._curves is not None or told.near_best(held, self.tolerance):
            return plan
        if (told.comparable > 0).sum() < 2:
            return plan
        return RoundPlan.of(self._divided(np.asarray(held), told.comparable), self.max_micro_batch)

    def state_dict(self) -> dict[str, Any]:
        """What is known of the ranks' curves."""
        return {} if self._curves is None else self._curves.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        if bool(state) != (self._curves is not None):
            raise ValueError(
                f"the state is of LBBSP with another device than {self.device!r}; resume with the same, or begin anew "
                "with the model's parameters alone"
            )
        if self._curves is not None:
            self._curves.load_state_dict(state)

    def _check_divisible(self, workers: int, global_batch: int) -> None:
        """Whether the global batch can be divided as asked, said here since the user set no ``total``."""
        multiple = self.multiple_of
        share = -(-self.minimum // multiple) * multiple  # the least share: ``minimum`` in whole multiples
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

    def _divided(self, shares: npt.NDArray[np.int64], speeds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """What the ranks of known speed hold together, in proportion to it."""
        known, wanted = speeds > 0, shares.copy()
        wanted[known] = proportional(
            speeds[known], int(shares[known].sum()), minimum=self.minimum, multiple_of=self.multiple_of
        )
        return wanted

    def _worthwhile(
        self,
        shares: npt.NDArray[np.int64],
        wanted: npt.NDArray[np.int64],
        speeds: npt.NDArray[np.int64],
        uncertain: npt.NDArray[np.float64],
    ) -> bool:
        # Time x / v in integers: x < 2^24 shifted by 38 stays below 2^62, and v has 30 bits.
        times = (shares << 38) // speeds
        surely_s = int((times - (times * np.maximum(uncertain, self.tolerance)).astype(np.int64)).max())
        next_s = int(((wanted << 38) // speeds).max())
        return next_s < surely_s


def _numbers(figures: Sequence[float]) -> _Numbers:
    """As they are for few ranks, an array for many."""
    return figures if len(figures) <= FEW_RANKS else np.array(figures)


class _Told:
    """The speeds that the ranks tell: plain numbers for few ranks, since most rounds end here; integers for many.

    Either way the sum is exactly rounded, and what follows is the same on every processor. The two may differ where a
    split is just as good as asked, to the last bit; but all ranks of one job take the same way.
    """

    def __init__(self, speeds: _Numbers) -> None:
        if isinstance(speeds, np.ndarray):
            self.speeds: _Numbers = comparable_speeds(speeds)
            self._together = float(self.speeds.sum()) if self.speeds.all() else math.nan
        else:
            self.speeds = speeds
            self._together = math.fsum(speeds) if all(0.0 < v < math.inf for v in speeds) else math.nan

    @property
    def comparable(self) -> npt.NDArray[np.int64]:
        """See :func:`comparable_speeds`."""
        return self.speeds if isinstance(self.speeds, np.ndarray) else comparable_speeds(np.asarray(self.speeds))

    def near_best(self, shares: _Numbers, tolerance: float, uncertain: _Numbers | None = None) -> bool:
        """Whether no split is sooner by more than ``tolerance`` and what is uncertain; False where a speed is unknown.

        None is sooner than X / sum v.
        """
        if math.isnan(self._together):
            return False
        v = self.speeds
        if isinstance(v, np.ndarray):
            surely = 1.0 - (tolerance if uncertain is None else np.maximum(uncertain, tolerance))
            return bool(np.sum(shares) / self._together >= (shares / v * surely).max())
        margins = [tolerance] * len(v) if uncertain is None else uncertain
        latest_s = max(x / y * (1.0 - max(share, tolerance)) for x, y, share in zip(shares, v, margins, strict=True))
        return bool(sum(shares) / self._together >= latest_s)
