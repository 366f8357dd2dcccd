"""Other decisions for LB-BSP, for ``default.py``. They have no state to save, and give each rank a sample at least."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hvd_hetero.allocation.largest_remainder import proportional
from hvd_hetero.policies import LBBSP
from hvd_hetero.policies.affine_shares import AffineCosts
from hvd_hetero.policies.evidence import _DOUBT_PER_SCATTER, Evidence
from hvd_hetero.policies.policy import Policy
from hvd_hetero.prediction import Predictor, Reverting
from hvd_hetero.rounds import FinishedRound, RoundPlan, RoundTable

Floats = npt.NDArray[np.float64]
TOLERANCE = 0.03
_STEP, _NORMAL = 1.1, 0.6745  # by which a median is found, and what it is of a standard deviation


class Candidate(Policy):
    """Equal shares first, and the exact split for known costs."""

    name = "candidate"
    shares_alone = True

    def __init__(self, max_micro_batch: int | None = None) -> None:
        self.max_micro_batch = max_micro_batch

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Return equal shares."""
        self.equal = RoundPlan.of(proportional(np.ones(workers), global_batch), self.max_micro_batch)
        self.reference = self.equal.typical_size
        self.begin(workers)  # to learn
        return self.equal

    def costs(self, rates: Floats, beta: Floats) -> AffineCosts:
        """Return what knows the best split for t = (x + k β) / rate."""
        return AffineCosts(rates / (1.0 + beta / self.reference), beta, self.reference, 1, 1)

    def part(self, costs: AffineCosts, begin: RoundPlan, end: RoundPlan, part: float) -> RoundPlan:
        """Return the plan this part of the way from one to another."""
        return end if part >= 1.0 else RoundPlan.of(costs.between(begin, end, max(part, 0.0)), self.max_micro_batch)

    def within_reach(self, costs: AffineCosts, plan: RoundPlan, wanted: RoundPlan) -> RoundPlan:
        """Return the wanted plan, or that part of the way where micro-batches stay within 1.5 of those measured."""
        cuts, held = np.maximum(wanted.batch_counts, 1), plan.shares
        most = np.maximum(np.maximum(self.most * 1.5, self.most + 1) * cuts, held)
        least = np.minimum(np.minimum(self.least / 1.5, self.least - 1) * cuts, held)
        beyond = np.maximum(wanted.shares - most, 0) + np.maximum(least - wanted.shares, 0)
        return self.part(costs, plan, wanted, float((1 - beyond / np.maximum(abs(wanted.shares - held), 1)).min()))

    def note(self, size: Floats) -> None:
        """Note what sizes were measured."""
        self.least, self.most = np.minimum(self.least, size), np.maximum(self.most, size)


class Sketch(Candidate):
    """Three averages of log time and size of each rank, one grid of φ for all, departures of eight times the gain."""

    WEIGHTS = np.array([1.0, 0.5, 0.1])
    SHARES = np.concatenate([np.linspace(0, 0.9, 19), [0.92, 0.94, 0.96, 0.98, 0.99]])
    upper = False  # True: the gain is judged at the 85 % quantile of φ, not at its mean

    def begin(self, workers: int) -> None:
        self.times: Floats | None = None
        self.errors, self.noise, self.sign = np.full((workers, 3), 1e-4), np.full(workers, 0.1), np.zeros(workers)
        self.against, self.beta, self.high = np.zeros(len(self.SHARES)), 0.0, 0.0
        self.least, self.most = np.full(workers, np.inf), np.zeros(workers)

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        table = finished.table
        cuts = np.maximum(table.column("micro_batches"), 1)
        size, time = table.work / cuts, np.log(table.busy_s / cuts)
        self.note(size)
        if self.times is None:
            self.times, self.sizes = np.repeat(time[:, None], 3, 1), np.repeat(size[:, None], 3, 1)
            self.rounds = np.ones(len(size))
            return plan
        self.learn(size, time)
        weights = self.weights()
        rates, sure = self.rates(weights, self.beta)
        costs = self.costs(rates, np.full(len(rates), self.beta))
        wanted, gain = costs.divided(plan, self.max_micro_batch or 0), costs.gain(self.equal, sure)
        if self.upper:
            high = self.rates(weights, self.high)[0]
            gain = self.costs(high, np.full(len(rates), self.high)).gain(self.equal, sure)
        departs, held = (float((1 - p.shares / self.equal.shares).max()) for p in (wanted, plan))
        wanted = self.part(costs, self.equal, wanted, 8.0 * gain / departs if departs else 1.0)
        if held > 12.0 * gain + 0.02 or costs.latest_s(wanted) < costs.latest_s(plan, sure) * (1 - TOLERANCE):
            return self.within_reach(costs, plan, wanted)
        back = costs.latest_s(self.equal) <= costs.latest_s(wanted) * (1 + TOLERANCE * 2 / 3)
        return self.equal if back and plan.total == self.equal.total else plan

    def learn(self, size: Floats, time: Floats) -> None:
        """Weigh each φ, and take the round into the averages; two surprises of one sign begin a rank anew."""
        weights, betas = self.weights(), self.reference * self.SHARES / (1 - self.SHARES)
        usual = (weights * self.sizes).sum(1)
        missed = time[:, None] - (weights * self.times).sum(1)[:, None]
        missed = missed - np.log((size[:, None] + betas) / (usual[:, None] + betas))
        tells = abs(missed).min(1) <= 5 * self.noise
        if abs(size - usual).max() > 0.02 * self.reference and tells.any():
            spread = 4 * (1.3 * self.noise**2 + 1e-4)
            self.against += (5 * np.log1p(missed**2 / spread[:, None]))[tells].sum(0)
            self.against = np.minimum(self.against - self.against.min(), 60.0)
            likely = np.exp(-0.5 * self.against) / np.exp(-0.5 * self.against).sum()
            phi, high = float(likely @ self.SHARES), self.SHARES[np.searchsorted(likely.cumsum(), 0.85)]
            self.beta, self.high = self.reference * phi / (1 - phi), self.reference * high / (1 - high)
        each = time[:, None] - self.times - np.log((size[:, None] + self.beta) / (self.sizes + self.beta))
        own = (weights * each).sum(1)
        self.noise = np.clip(self.noise * np.where(abs(own) > _NORMAL * self.noise, _STEP, 1 / _STEP), 1e-3, 1.0)
        self.errors = 0.98 * self.errors + np.minimum(each**2, (5 * self.noise[:, None]) ** 2)
        sign = np.where(abs(own) > 3 * self.noise, np.sign(own), 0.0)
        anew = (sign != 0) & (sign == self.sign)
        self.sign, self.rounds = np.where(anew, 0.0, sign), np.where(anew, 1.0, self.rounds + 1)
        part = np.where(anew, 1.0, np.minimum(4 * self.noise / np.maximum(abs(own), 1e-12), 1.0))
        part = part[:, None] * np.maximum(self.WEIGHTS, 1 / self.rounds[:, None])
        self.times = self.times + part * (time[:, None] - self.times)
        self.sizes = self.sizes + part * (size[:, None] - self.sizes)

    def weights(self) -> Floats:
        """Return the weight of each average, by its errors."""
        weights = (self.errors.min(1, keepdims=True) / self.errors) ** 6
        return weights / weights.sum(1, keepdims=True)

    def rates(self, weights: Floats, beta: float) -> tuple[Floats, Floats]:
        """Return the ranks' rates by that β, and the share of their times that is beyond doubt."""
        level = (weights * (self.times - np.log(self.sizes + beta))).sum(1)
        error = self.noise * np.sqrt((weights**2 * (self.WEIGHTS / (2 - self.WEIGHTS))).sum(1))
        return np.exp(-level), np.exp(-1.5 * error)


class SketchByReverting(Sketch):
    """The sketch, with what ``Reverting`` forecasts of each rank in place of the averages."""

    weighs_fixed_cost = True

    def predictor(self) -> Predictor:
        """Return what each rank predicts its speed by."""
        return Reverting()

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        self.table = finished.table
        known = (self.table.column("samples_per_s") > 0).all()
        return super().next(plan, finished) if known else plan

    def rates(self, weights: Floats, beta: float) -> tuple[Floats, Floats]:
        speeds, fixed = self.table.column("samples_per_s"), self.table.column("fixed_samples")
        held = (weights * self.sizes).sum(1)
        seconds = (held + fixed) / (speeds * (1 + fixed / self.reference))
        return (held + beta) / seconds, np.exp(-1.5 * self.noise / 3)  # Reverting's error is a third of the scatter


class LeastSquares(Candidate):
    """t = a x + b for each rank, by recursive least squares with a common prior for b / a; moves beyond their error."""

    keep, errors = 0.95, 2.0  # of a round's weight, in the next one; standard errors that a gain must have

    def begin(self, workers: int) -> None:
        self.squares, self.products = np.zeros((workers, 2, 2)), np.zeros((workers, 2))
        self.variance, self.ratio, self.rounds = np.full(workers, 0.05**2), 0.0, 0
        self.least, self.most = np.full(workers, np.inf), np.zeros(workers)

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        table = finished.table
        cuts = np.maximum(table.column("micro_batches"), 1)
        size, seconds = table.work / cuts, table.busy_s / cuts
        self.note(size)
        features = np.stack([size / self.reference, np.ones(len(size))], 1) / seconds[:, None]
        if self.rounds:
            missed = 1 - (features * self.line).sum(1)
            strange = abs(missed) > 5 * np.sqrt(self.variance) + 0.1
            self.squares[strange] *= 0.1
            self.products[strange] *= 0.1
            self.variance = 0.95 * self.variance + 0.05 * np.minimum(missed**2, 9 * self.variance + 1e-3)
        self.rounds += 1
        self.squares = self.keep * self.squares + features[:, :, None] * features[:, None, :]
        self.products = self.keep * self.products + features
        prior = np.stack([np.full(len(size), -self.ratio), np.ones(len(size))], 1) / seconds[:, None]
        precise = self.squares + prior[:, :, None] * prior[:, None, :] + 1e-9 * np.eye(2) / seconds[:, None, None] ** 2
        self.covariance = np.linalg.inv(precise)
        self.line = np.einsum("nij,nj->ni", self.covariance, self.products)
        slopes, fixed = np.maximum(self.line[:, 0], 1e-12), np.maximum(self.line[:, 1], 0.0)
        tells = 1 - self.squares[:, 0, 1] ** 2 / (self.squares[:, 0, 0] * self.squares[:, 1, 1])
        tells = np.maximum(tells, 0.0)
        if tells.sum() > 1e-6:
            found = float((tells * np.minimum(fixed / slopes, 50.0)).sum() / tells.sum())
            self.ratio += min(1.0, float(tells.sum())) * (found - self.ratio)
        if self.rounds < 3:
            return plan
        costs = self.costs(self.reference / slopes, np.minimum(fixed / slopes, 99.0) * self.reference)
        wanted = costs.divided(plan, self.max_micro_batch or 0)
        gain = 1 - costs.latest_s(wanted) / costs.latest_s(plan)
        if gain < max(TOLERANCE, self.errors * math.hypot(self.error(plan), self.error(wanted))):
            return plan
        return self.within_reach(costs, plan, wanted)

    def error(self, plan: RoundPlan) -> float:
        """Return the largest relative error of a rank's time."""
        at = np.stack([plan.shares / np.maximum(plan.batch_counts, 1) / self.reference, np.ones(plan.workers)], 1)
        spread = np.sqrt(self.variance * np.einsum("ni,nij,nj->n", at, self.covariance, at))
        return float((spread / (at * self.line).sum(1)).max())


class Control(Candidate):
    """Shares follow mean times since the last change, with a dead band of three errors; what was no gain is taken back.

    A rank's times are averaged since its share has changed, or its speed: two rounds in a row that are four deviations
    off, and alike. Before four rounds under the present split nothing is decided, so tables may come late. The step
    counts on a β that all ranks share, and on φ = 3/4 at most: less makes steps smaller, and never too large. A step
    after which the latest rank is later beyond doubt is taken back, and the tolerance doubles until a speed changes.
    """

    weighs_fixed_cost = True
    rounds, errors, longest, most_odds, takes_back = 4, 3.0, 100, 3.0, True

    def begin(self, workers: int) -> None:
        self.mean, self.counted, self.odd = np.zeros(workers), np.zeros(workers), np.full(workers, np.nan)
        self.noise, self.held, self.before, self.doubt = np.full(workers, 0.1), None, None, 1.0

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        busy_s = finished.table.busy_s
        if finished.plan.samples != plan.samples:
            return plan  # a round of an earlier plan, or a short one
        self.learn(busy_s, np.array(plan.shares))
        if self.counted.min() < self.rounds:
            return plan
        cuts, fixed = np.maximum(plan.batch_counts, 1), float(finished.table.column("fixed_samples").mean())
        beta = np.full(len(busy_s), fixed if cuts.max() > 1 else min(fixed, self.most_odds * self.reference))
        costs = self.costs((plan.shares + cuts * beta) / self.mean, beta)
        sure = 1 / (1 + self.errors * self.noise / np.sqrt(np.minimum(self.counted, self.longest)))
        if self.takes_back and self.before is not None and (self.mean * sure).max() > self.before[1]:
            back, self.before, self.doubt = self.before[0], None, 2 * self.doubt
            return back if back.total == plan.total else plan
        tolerance = min(self.doubt * TOLERANCE, 0.9)
        if costs.near_best(plan, tolerance) or costs.near_best(plan, 0.0, sure):
            return plan
        wanted = costs.divided(plan, self.max_micro_batch or 0)
        if costs.latest_s(wanted) > (1 - tolerance) * costs.latest_s(plan):
            return plan
        self.before = plan, float(self.mean.max())
        return wanted

    def learn(self, busy_s: Floats, held: npt.NDArray[np.int64]) -> None:
        """Take a round into the means."""
        changed = np.ones(len(held), np.bool_) if self.held is None else held != self.held
        self.held, self.counted = held, np.where(changed, 0, self.counted)
        self.odd = np.where(changed, np.nan, self.odd)
        known, mean = self.counted > 0, np.where(self.counted > 0, self.mean, busy_s)
        off = np.where(busy_s > mean, busy_s / mean - 1, 1 - mean / busy_s)
        far = known & (abs(off) > 4 * self.noise)
        anew = far & (abs(busy_s / self.odd - 1) < 6 * self.noise)
        small = np.clip(off, -3 * self.noise, 3 * self.noise) / np.minimum(self.counted + 1, self.longest)
        self.mean = np.where(anew, (busy_s + self.odd) / 2, mean * (1 + small))
        usual = _NORMAL * self.noise * np.sqrt(1 + 1 / np.clip(self.counted, 1, self.longest))
        step = np.where(abs(off) > usual, _STEP, 1 / _STEP)
        self.noise = np.where(known & ~anew, np.clip(self.noise * step, 1e-3, 0.3), self.noise)
        self.counted, self.odd = np.where(anew, 2, self.counted + 1), np.where(far & ~anew, busy_s, np.nan)
        if anew.any():
            self.speed_changed()

    def speed_changed(self) -> None:
        """Forget what waits for an answer, since the answer would be to something else."""
        self.before, self.doubt = None, 1.0


class Cautious(LBBSP):
    """Today's, where no step counts on more than φ = 3/4, and so none is too large."""

    def _worthwhile(self, plan: RoundPlan, speeds: Floats, fixed: Floats, limits: Floats) -> RoundPlan:
        if plan.batch_counts.max() <= 1:
            size, beta = self._typical_size, np.minimum(fixed, 3.0 * self._typical_size)
            held_s = (plan.shares + fixed) / (speeds * (1.0 + fixed / size))
            speeds, fixed = (plan.shares + beta) / held_s / (1.0 + beta / size), beta
        return super()._worthwhile(plan, speeds, fixed, limits)


class EvidenceOfMeans(Evidence):
    """A rank's mean time since its share changed, in place of its forecast, once the mean has the smaller error."""

    longest = 100  # rounds of a mean

    def __init__(self, workers: int, typical_size: float, step: int = 1) -> None:
        super().__init__(workers, typical_size, step)
        self.size, self.mean, self.counted, self.differs = np.zeros((4, workers))

    def learn(self, table: RoundTable) -> None:
        """Take a round into the means."""
        super().learn(table)
        count = np.maximum(table.column("micro_batches"), 1.0)
        size, seconds = table.column("timed_samples") / count, table.busy_s / count
        told = (size > 0.0) & (seconds > 0.0)
        self.counted = np.where(told & (size != self.size), 0.0, self.counted)
        off = np.clip(
            seconds / np.where(self.counted > 0.0, self.mean, seconds) - 1.0, *(3.0 * self._scatter * [[-1], [1]])
        )
        mean = np.where(
            self.counted > 0.0, self.mean * (1.0 + off / np.minimum(self.counted + 1.0, self.longest)), seconds
        )
        self.mean, self.size = np.where(told, mean, self.mean), np.where(told, size, self.size)
        self.counted += told

    def better(self, speeds: Floats, fixed: Floats) -> Floats:
        """Return speeds by means where these are better; forget a mean that forecasts contradict twice in a row."""
        with np.errstate(invalid="ignore", divide="ignore"):
            by_mean = (self.size + fixed) / (1.0 + fixed / self._typical_size) / self.mean
            contradicted = np.abs(speeds / by_mean - 1.0) > _DOUBT_PER_SCATTER * self._scatter
        self.differs = np.where(contradicted & (self.counted > 1), self.differs + 1, 0)
        self.counted = np.where(self.differs > 1, 0.0, self.counted)
        return np.where(self.counted >= 9.0, by_mean, speeds)

    def trusted_part(self, fixed: Floats) -> Floats:
        """Return the share of each rank's time that is beyond doubt."""
        doubt = np.minimum(1.0, 3.0 / np.sqrt(np.clip(self.counted, 1.0, self.longest)))
        return 1.0 - (1.0 - super().trusted_part(fixed)) * doubt


class ByMeans(Cautious):
    """Cautious steps, by mean times where a split has stayed: the longer it stays, the better it is known."""

    made_of = (EvidenceOfMeans,)

    def _worthwhile(self, plan: RoundPlan, speeds: Floats, fixed: Floats, limits: Floats) -> RoundPlan:
        return super()._worthwhile(plan, self._evidence.better(speeds, fixed), fixed, limits)

    def _no_evidence(self) -> Evidence:
        return EvidenceOfMeans(self._equal.workers, self._typical_size, self.multiple_of)


class TrustRegion(Control):
    """Reverting speeds propose; a radius around equal shares bounds the split, and the rounds' own answers move it.

    After a move the saved time is that of the latest rank, by mean times since the shares changed and those before. If
    it is beyond doubt more than a quarter of the promised, the radius doubles. If it is beyond doubt less, the radius
    halves and the split is taken back. After 20 rounds that counts without a doubt. So no split stays much longer that
    is no gain.
    """

    first_radius, least_radius, answer, doubt_per_noise = 0.5, 0.125, 0.25, 2.0 / 3.0
    patience, rounds, errors = 20, 2, 2.0

    def predictor(self) -> Predictor:
        """Return what each rank predicts its speed by."""
        return Reverting()

    def begin(self, workers: int) -> None:
        super().begin(workers)
        self.radius, self.promise = self.first_radius, None

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        table = finished.table
        if finished.plan.samples != plan.samples or plan.total != self.equal.total:
            return plan
        self.learn(table.busy_s, np.array(plan.shares))
        speeds, fixed = table.column("samples_per_s"), float(table.column("fixed_samples").mean())
        if not (speeds > 0).all() or self.counted.min() < self.rounds:
            return plan
        if self.promise is not None and (answered := self.judge()) is not None:
            return answered
        costs = AffineCosts(speeds, np.full(len(speeds), fixed), self.reference, 1, 1)
        wanted = costs.divided(plan, self.max_micro_batch)
        departs = float((1 - wanted.shares / self.equal.shares).max())
        within = self.part(costs, self.equal, wanted, self.radius / departs if departs else 1.0)
        if (
            not costs.near_best(plan, TOLERANCE, 1 - self.doubt_per_noise * self.noise)
            and within.samples != plan.samples
        ):
            saves = 1 - costs.latest_s(within) / costs.latest_s(plan)
            if saves > 0:
                self.promise = plan, float(self.mean.max()), self.counted.min(), saves
                return within
        if costs.latest_s(self.equal) < costs.latest_s(plan):
            self.promise = None
            return self.equal
        return plan

    def judge(self) -> RoundPlan | None:
        """Return the split before the latest one if that is no gain."""
        before, latest_s, counted, saves = self.promise
        error = self.errors * float(self.noise.max()) * math.sqrt(1 / counted + 1 / self.counted.min())
        error = 0.0 if self.counted.min() >= self.patience else error
        saved = 1 - float(self.mean.max()) / latest_s
        if saved - error > self.answer * saves:
            self.radius, self.promise = min(2 * self.radius, 1.0), None
        elif saved + error < self.answer * saves:
            self.radius, self.promise = max(self.radius / 2, self.least_radius), None
            return before
        return None

    def speed_changed(self) -> None:
        """Forget what waits for an answer, since the answer would be to something else."""
        self.promise = None
