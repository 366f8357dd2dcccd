"""The mixture of predictors: what it is made of, and that it is about as good as the best of its members."""

import json
import math

import numpy as np
import pytest

from hvd_hetero.prediction import EMA, NARX, Memoryless, Mixture, Reverting, predictor


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


@pytest.mark.parametrize("kind", ["noise", "walk", "walk and noise", "spikes", "heavy tails", "reverting", "bursts"])
def test_its_error_is_at_most_a_fiftieth_above_that_of_the_best_member(kind):
    """Over three series of 600 rounds each; the benchmark has more kinds, and those where it is not so."""
    squares = np.zeros(5)
    for seed in range(3):
        speeds = speeds_of(kind, 600, seed)
        squares += [np.mean(errors(p, speeds) ** 2) for p in (Mixture(), *singles())]
    assert math.sqrt(squares[0]) <= 1.02 * math.sqrt(min(squares[1:]))


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


def test_one_round_a_thousand_times_too_slow_is_forgotten():
    """From 40 rounds after it on, at most 3 % worse than its twin that never saw it."""
    hit, spared = [], []
    for seed in range(5):
        speeds = speeds_of("noise", 500, seed)
        struck = speeds.copy()
        struck[60] /= 1000.0
        hit.append(rms(errors(Mixture(), struck)[100:]))
        spared.append(rms(errors(Mixture(), speeds)[100:]))
    assert np.mean(hit) <= 1.03 * np.mean(spared)


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
    assert [m.name for m in plain.members] == ["memoryless", "ema", "reverting", "ema"]
    assert [m.name for m in driven.members] == ["memoryless", "ema", "reverting", "ema"]
    assert not plain.uses_drivers
    assert driven.uses_drivers
    assert [m.uses_drivers for m in driven.members] == [False, False, True, False]


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


def test_one_member_is_repeated_exactly():
    mixture, alone = Mixture([EMA()]), EMA()
    for v in np.random.default_rng(10).uniform(1, 9, 50):
        mixture.update(v)
        alone.update(v)
        assert mixture.predict() == pytest.approx(alone.predict())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixture(share=1.0), r"share: must be in \[0, 1\)"),
        (lambda: Mixture([]), "members: must be one predictor or more"),
        (lambda: Mixture(["ema"]), "members: must be one predictor or more"),
        (lambda: Mixture([EMA()] * 2), "members: must be different objects"),
        (lambda: Mixture([EMA()], drivers=True), "drivers: chooses among the default members"),
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
    with pytest.raises(ValueError, match=r"members must be \['ema', 'memoryless'\], got \['ema', 'reverting'\]"):
        Mixture([EMA(), Memoryless()]).load_state_dict(state)
    with pytest.raises(ValueError, match="must each hold 2 finite numbers"):
        Mixture([EMA(), Reverting()]).load_state_dict(state | {"experts": state["experts"] | {"log_e": [0.0]}})


def test_members_that_use_drivers_are_trusted_from_the_start_where_the_cpu_is_known():
    known, unknown = (Mixture([EMA(), Reverting(drivers=True), Memoryless()]) for _ in range(2))
    known.update(100.0, 0.5, 0.5)
    unknown.update(100.0, None, 0.5)
    assert known.weights == pytest.approx((0.025, 0.95, 0.025))
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
    for number in range(4):
        other = Mixture(drivers=True)
        broken = json.loads(json.dumps(state))
        broken["members"][number]["measured"] = [-1.0] * 3
        with pytest.raises(ValueError, match="measured must be the last, slowest and fastest"):
            other.load_state_dict(broken)
        assert [member.rounds for member in other.members] == [0] * 4


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
