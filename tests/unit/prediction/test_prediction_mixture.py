"""The mixture of predictors: what it is made of, and that it is about as good as the best of its members."""

import json
import math

import numpy as np
import pytest

from hvd_hetero.prediction import EMA, NARX, Memoryless, Mixture, Predictor, Reverting, predictor


def rms(errors):
    return float(np.sqrt(np.mean(np.square(errors))))


def errors(p, speeds):
    """Of the forecasts, relative to 100, from the second round on."""
    out = []
    for k, v in enumerate(speeds):
        if k:
            out.append(p.predict() / 100.0 - v / 100.0)
        p.update(v)
    return np.array(out)


def singles():
    return Memoryless(), EMA(0.5), EMA(), Reverting()


class Says(Predictor):
    """Forecasts what it was told, from the second round on."""

    name = "says"

    def __init__(self, forecasts):
        super().__init__()
        self.forecasts = forecasts

    def _observe(self, speed, cpu, memory):
        pass

    def _forecast(self, cpu, memory):
        return self.forecasts[self.rounds]

    def _state(self):
        return {}

    def _restore(self, state):
        pass


def scattering(deviations, rounds, seed, speed=100.0):
    """Measured speeds, and forecasts that are off by so much, a column for each."""
    rng = np.random.default_rng(seed)
    return np.full(rounds + 1, speed), speed * (1.0 + rng.normal(0, deviations, (rounds + 1, len(deviations))))


def weights_of(speeds, forecasts):
    """After each round."""
    mixture, found = Mixture([Says(column) for column in forecasts.T.tolist()]), []
    for v in speeds[:-1].tolist():
        mixture.update(v)
        found.append(mixture.weights)
    return np.array(found)


def by_the_formula(speeds, forecasts, prior):
    """The weights after each round, each from all squared errors so far: nothing is carried over but how they count."""
    counted = np.zeros((0, len(prior)))
    for k in range(1, len(speeds) + 1):
        sums = (0.99 ** np.arange(len(counted))[::-1]) @ counted
        weights = np.array(prior)
        if sums.max() > 0.0:
            with np.errstate(divide="ignore"):
                weights = weights * np.where(sums > 0.0, sums.min() / sums, 1.0) ** min(12, (k - 1) / 4)
        yield weights / weights.sum()
        if k < len(speeds):
            squares = (forecasts[k] - speeds[k]) ** 2
            limit = sums.max() if sums.max() > 1e-12 * min(speeds[k], *forecasts[k]) ** 2 else np.inf
            counted = np.vstack([counted, squares * min(1.0, limit / max(squares.max(), 1e-300))])


def speeds_of(kind, rounds, seed):
    rng = np.random.default_rng(seed)
    y = rng.normal(0, 0.03, rounds)
    if kind == "walk":
        y = y.cumsum()
    if kind == "walk and noise":
        y = y + rng.normal(0, 0.01, rounds).cumsum()
    if kind == "spikes":
        y = y - np.where(rng.random(rounds) < 0.03, rng.uniform(0.7, 1.6, rounds), 0.0)
    if kind == "heavy tails":
        y = 0.03 * np.clip(rng.standard_t(2, rounds), -30, 30)
    if kind == "reverting":
        for k in range(1, rounds):
            y[k] += 0.7 * y[k - 1]
    if kind == "bursts":
        y = y - 0.7 * (np.arange(rounds) % 60 > 52)
    return 100.0 * np.exp(y)


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("noise", 1.02),
        ("walk", 1.02),
        ("walk and noise", 1.04),  # EMA 0.2, no member, is best
        ("spikes", 1.03),
        ("heavy tails", 1.02),
        ("reverting", 1.02),
        ("bursts", 1.02),
    ],
)
def test_its_error_is_little_above_that_of_the_best_single_predictor(kind, most):
    """Over three series of 600 rounds each; the benchmark has more kinds."""
    squares = np.zeros(5)
    for seed in range(3):
        speeds = speeds_of(kind, 600, seed)
        squares += [np.mean(errors(p, speeds) ** 2) for p in (Mixture(), *singles())]
    assert math.sqrt(squares[0]) <= most * math.sqrt(min(squares[1:]))


@pytest.mark.parametrize("sudden", ["noise to walk", "walk to noise"])
def test_a_change_after_long_sameness_is_followed(sudden):
    """After 2,000 rounds of one kind, 400 of the other: at most 15 % above the best member there."""
    kinds = sudden.split(" to ")
    ratios = []
    for seed in range(3):
        first = speeds_of(kinds[0], 2000, seed)
        speeds = np.concatenate([first, first[-1] / 100.0 * speeds_of(kinds[1], 400, seed + 50)])
        ours, *others = (rms(errors(p, speeds)[-400:]) for p in (Mixture(), *singles()))
        ratios.append(ours / min(others))
    assert np.mean(ratios) < 1.15


@pytest.mark.parametrize("kind", ["noise", "walk"])
@pytest.mark.parametrize("factor", [1 / 1000, 1000], ids=["a thousandth", "a thousandfold"])
def test_one_strange_round_costs_little_for_hundreds_of_rounds_and_nothing_later(kind, factor):
    """From 40 rounds after it on, against a twin that never saw it."""
    ratios = []
    for seed in range(4):
        speeds = speeds_of(kind, 1000, seed)
        struck = speeds.copy()
        struck[300] *= factor
        hit, spared = (errors(Mixture(), v) / v[1:] for v in (struck, speeds))
        ratios.append([rms(hit[a:b]) / rms(spared[a:b]) for a, b in ((340, 600), (600, 999))])
    soon, later = np.mean(ratios, axis=0)
    assert soon <= 1.07
    assert later <= 1.01


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.05])
def test_on_equal_machines_its_forecast_scatters_less_than_emas_after_some_rounds(noise):
    """Measurement noise around a constant speed: from round 50 on no more than EMA 0.2, from 100 on four fifths."""
    scatter = {"ours": [], "emas": []}
    for seed in range(6):
        rng = np.random.default_rng([seed, 21])
        ours, ema = Mixture(), EMA()
        for v in 100.0 * np.exp(rng.normal(0, noise, 300)):
            ours.update(v)
            ema.update(v)
            scatter["ours"].append(math.log(ours.predict() / 100.0))
            scatter["emas"].append(math.log(ema.predict() / 100.0))
    ours, ema = (np.reshape(scatter[who], (6, 300)) for who in ("ours", "emas"))
    assert rms(ours[:, 50:]) <= rms(ema[:, 50:])
    assert rms(ours[:, 100:]) <= 0.8 * rms(ema[:, 100:])


def test_by_name_it_needs_no_drivers_and_with_them_one_member_reads_them():
    plain, driven = predictor("mixture"), predictor("mixture", drivers=True)
    assert [m.name for m in plain.members] == ["memoryless", "ema", "reverting"]
    assert [m.name for m in driven.members] == ["memoryless", "ema", "reverting"]
    assert not plain.uses_drivers
    assert driven.uses_drivers
    assert [m.uses_drivers for m in driven.members] == [False, False, True]


@pytest.mark.parametrize("kind", ["noise", "walk", "spikes", "bursts"])
def test_without_a_known_cpu_drivers_cost_nothing(kind):
    plain, driven, squares = Mixture(), Mixture(drivers=True), []
    for v in speeds_of(kind, 600, 11):
        if plain.rounds:
            squares.append([(p.predict() - v) ** 2 for p in (driven, plain)])
        plain.update(v, 0.5, 0.5)
        driven.update(v, None, 0.5)
    ours, theirs = np.sqrt(np.mean(squares, axis=0))
    assert ours < 1.02 * theirs


@pytest.mark.parametrize("kind", ["noise", "walk", "spikes", "bursts"])
@pytest.mark.parametrize("cpu", [None, 0.5], ids=["no cpu", "cpu"])
def test_weights_and_forecasts_are_those_of_the_formula(kind, cpu):
    speeds = speeds_of(kind, 200, 17)
    speeds[[90, 140]] *= 1000.0, 1e-3
    mixture, members = Mixture(drivers=True), (Memoryless(), EMA(0.5), Reverting(drivers=True))
    said, found, told = [(math.nan,) * 3], [], []
    for v in speeds.tolist():
        mixture.update(v, cpu)
        for member in members:
            member.update(v, cpu)
        said.append(tuple(member.predict(cpu) for member in members))
        found.append(mixture.weights)
        told.append(mixture.predict(cpu))
    prior = (1 / 3, 1 / 3, 1 / 3) if cpu is None else (0.005, 0.005, 0.99)
    weights = np.array(list(by_the_formula(speeds, np.array(said), prior)))
    np.testing.assert_allclose(found, weights, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(told, np.prod(np.array(said[1:]) ** weights, axis=1), rtol=1e-9)


def test_weights_sum_to_one_and_do_not_depend_on_the_unit_of_speed():
    speeds, forecasts = scattering([0.01, 0.03, 0.1], 300, 1)
    weights = weights_of(speeds, forecasts)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=1e-12)
    for unit in (2.0**-40, 2.0**60):
        np.testing.assert_array_equal(weights_of(unit * speeds, unit * forecasts), weights)


@pytest.mark.parametrize("rounds", [300, 3000])
def test_the_member_that_becomes_best_is_followed_as_soon_after_any_history(rounds):
    speeds, forecasts = scattering([0.03, 0.05], rounds + 150, 2)
    forecasts[rounds:] = forecasts[rounds:, ::-1]
    weights = weights_of(speeds, forecasts)
    assert weights[100:rounds, 0].min() > 0.9
    assert weights[-1, 1] > 0.9


def test_a_round_far_too_fast_is_limited_where_speeds_hardly_scatter():
    """Errors of a hundred-thousandth of the speed are no rounding, however fast the round is that ends them."""
    speeds, forecasts = scattering([1e-5, 2e-5], 300, 5)
    speeds[200] *= 1e4
    assert weights_of(speeds, forecasts)[-1, 0] > 0.9


def test_errors_of_rounding_do_not_limit_the_first_real_one():
    """Else they would outweigh it, and the last two rounds alone would decide for a hundred rounds."""
    speeds, forecasts = scattering([0.02, 0.03], 60, 4)
    rounding = np.tile([100.0, 100.0 + 1e-12], (200, 1))
    after = weights_of(np.concatenate([np.full(200, 100.0), speeds]), np.vstack([rounding, forecasts]))[200:]
    alone = weights_of(np.concatenate([[100.0], speeds]), np.vstack([rounding[:1], forecasts]))[1:]
    np.testing.assert_allclose(after[48:], alone[48:], rtol=1e-6)  # before that, n differs


def test_speeds_whose_squares_are_no_numbers_leave_a_state_that_loads():
    mixture = Mixture()
    for v in (1e200, 1e-200, 1e200, 1.0):
        mixture.update(v)
    other = Mixture()
    other.update(1.0)
    other.predict()  # what it says now is not what it says with another state
    other.load_state_dict(json.loads(json.dumps(mixture.state_dict())))
    assert other.predict() == mixture.predict()


def test_one_member_is_repeated_exactly():
    mixture, alone = Mixture([EMA()]), EMA()
    for v in np.random.default_rng(10).uniform(1, 9, 50):
        mixture.update(v)
        alone.update(v)
        assert mixture.predict() == pytest.approx(alone.predict())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixture([]), "members"),
        (lambda: Mixture(["ema"]), "members"),
        (lambda: Mixture([EMA()] * 2), r"members.*different"),
        (lambda: Mixture([EMA()], drivers=True), r"drivers.*members"),
    ],
)
def test_bad_arguments_are_errors_that_name_them(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_state_of_other_members_or_with_bad_numbers_is_refused():
    mixture = Mixture([EMA(), Reverting()])
    for v in (3.0, 4.0, 6.0):
        mixture.update(v)
    state = mixture.state_dict()
    with pytest.raises(ValueError, match=r"members.* \['ema', 'memoryless'\].* \['ema', 'reverting'\]"):
        Mixture([EMA(), Memoryless()]).load_state_dict(state)
    for wrong in ({"errors": [0.0]}, {"errors": [-1.0, 0.0]}, {"errors": [0.0, math.inf]}, {"prior": [0.0, 1.0]}):
        with pytest.raises(ValueError, match="state of Mixture"):
            Mixture([EMA(), Reverting()]).load_state_dict(state | wrong)
    with pytest.raises(ValueError, match=r"version.* 7"):
        Mixture([EMA(), Reverting()]).load_state_dict(state | {"version": 6})


def test_members_that_use_drivers_are_trusted_from_the_start_where_the_cpu_is_known():
    known, unknown = (Mixture([EMA(), Reverting(drivers=True), Memoryless()]) for _ in range(2))
    known.update(100.0, 0.5, 0.5)
    unknown.update(100.0, None, 0.5)
    assert known.weights == pytest.approx((0.005, 0.99, 0.005))
    assert unknown.weights == pytest.approx((1 / 3, 1 / 3, 1 / 3))


def test_drivers_that_mean_nothing_cost_little_in_the_end():
    """With random numbers for the CPU, the last hundred rounds are about as good as without drivers."""
    rng = np.random.default_rng(13)
    mixture, plain = Mixture(drivers=True), EMA(0.5)
    errors = []
    for v in 100.0 * np.exp(rng.normal(0, 0.05, 400)):
        cpu = float(rng.uniform(0.2, 1.0))
        errors.append((mixture.predict(cpu, 0.5) - v, plain.predict() - v))
        mixture.update(v, cpu, 0.5)
        plain.update(v)
    ours, theirs = np.sqrt(np.mean(np.array(errors[300:]) ** 2, axis=0))
    assert ours < 1.1 * theirs


def test_a_state_is_loaded_as_a_whole_or_not_at_all():
    mixture = Mixture(drivers=True)
    for speed, cpu in jumping(120):
        mixture.update(speed, cpu)
    state = mixture.state_dict()
    for number in range(3):
        other = Mixture(drivers=True)
        broken = json.loads(json.dumps(state))
        broken["members"][number]["measured"] = [-1.0] * 3
        with pytest.raises(ValueError, match="measured"):
            other.load_state_dict(broken)
        assert [member.rounds for member in other.members] == [0] * 3


def jumping(rounds=1200, seed=2):
    """A CPU that jumps every 40 rounds, speeds that follow it at once, and readings that scatter by a hundredth."""
    rng = np.random.default_rng(seed)
    levels = np.repeat(rng.choice([0.3, 0.5, 0.9], rounds // 40), 40)
    cpus = np.clip(levels + rng.normal(0, 0.01, rounds), 0.01, 1.0)
    return list(zip((100 * levels * np.exp(rng.normal(0, 0.02, rounds))).tolist(), cpus.tolist(), strict=True))


def squares(p, rows):
    found = []
    for k, (speed, cpu) in enumerate(rows):
        found.append(math.log(p.predict(cpu) / speed) ** 2 if k else 0.0)
        p.update(speed, cpu)
    return np.array(found)


def test_members_that_know_of_jumps_count_in_jumps_and_others_between_them():
    """About as good as any: some have the driver's scatter in quiet rounds, others are late in jumps."""
    rows = jumping()
    ours = squares(Mixture(drivers=True), rows)[200:].mean()
    blind = squares(Mixture(), rows)[200:].mean()
    members = [squares(p, rows)[200:].mean() for p in (*singles(), Reverting(drivers=True), NARX(background=False))]
    assert ours < 1.04 * min(members)
    assert ours < 0.2 * blind


def test_a_state_in_the_middle_of_a_jump_goes_on_as_it_would_have():
    rows = jumping(480)
    one = Mixture(drivers=True)
    for speed, cpu in rows[:242]:
        one.update(speed, cpu)
    two = Mixture(drivers=True)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for speed, cpu in rows[242:]:
        assert one.predict(cpu) == two.predict(cpu)
        one.update(speed, cpu)
        two.update(speed, cpu)
