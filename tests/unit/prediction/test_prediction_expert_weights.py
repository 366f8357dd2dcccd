"""The weights of experts: against their recurrences written out, and their bound on random and adversarial series."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.prediction.mixture.expert_weights import ExpertWeights

KINDS = ["noise", "jumps", "swap", "growing", "outliers", "bursts"]
SHARES = [0.0, 0.002, 0.05]


def uniform(k, share=0.002):
    return ExpertWeights((1.0 / k,) * k, share)


def series(kind, rounds, seed):
    """Outcomes and the forecasts of three experts, (rounds,) and (rounds, 3)."""
    rng = np.random.default_rng(seed)
    y = rng.normal(0, 0.1, rounds).cumsum() * 0.1 + rng.normal(0, 0.05, rounds)
    x = np.array([np.concatenate([[0.0], y[:-1]]), np.full(rounds, y.mean()), rng.normal(0, 0.3, rounds)]).T
    if kind == "jumps":
        y = y + 2.0 * (rng.random(rounds) < 0.02)
    if kind == "swap":  # each expert is right for a third of the time
        x = np.array([np.where(np.arange(rounds) * 3 // rounds == k, y, y + 0.4) for k in range(3)]).T
    if kind == "growing":  # the largest advantage of all in nearly every round
        y, x = y * np.linspace(1, 200, rounds), x * np.linspace(1, 200, rounds)[:, None]
    if kind == "outliers":
        y = y - 7.0 * (rng.random(rounds) < 0.01)
    if kind == "bursts":
        y, x = (z * np.where(np.arange(rounds) % 100 < 90, 1.0, 30.0)[(...,) + (None,) * (z.ndim - 1)] for z in (y, x))
    return y, x


def plainly(y, x, share):
    """The recurrences as the docstring has them, on arrays, without logarithms; yields κ and the next weights."""
    k = x.shape[1]
    prior, e, scale = np.full(k, 1 / k), np.ones(k), None
    w = prior
    for yt, xt in zip(y, x, strict=True):
        q = w @ xt
        r = 2 * (q - yt) * (q - xt)
        kappa = 1.0 if scale is None else min(1.0, 1.5 * scale.max() / max(abs(r).max(), 1e-300))
        r = kappa * r
        before = np.zeros(k) if scale is None else scale
        after = np.maximum.reduce([0.995 * before, abs(r), np.full(k, 0.01 * abs(r).max())])
        scale = after if scale is None else scale
        eta, eta_after = 0.2 / scale, 0.2 / after
        h = np.minimum(eta, 0.5 / after)
        e = (e * np.exp(eta * (r - h * r**2))) ** np.minimum(1.0, eta_after / eta)
        e = (1 - share) * e + share * (prior @ e)
        scale = after
        w = prior * eta_after * e
        w = w / w.sum()
        yield kappa, w


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", SHARES)
def test_weights_equal_the_recurrences_written_out(kind, share):
    y, x = series(kind, 250, 1)
    experts = uniform(3, share)
    for t, (kappa, w) in enumerate(plainly(y, x, share)):
        experts.learn(x[t], y[t])
        assert experts.counted == pytest.approx(kappa)
        np.testing.assert_allclose(experts.weights, w, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", SHARES)
def test_the_bound_holds_for_every_expert_in_every_round(kind, share):
    y, x = series(kind, 250, 5)
    experts = uniform(3, share)
    for t in range(250):
        experts.learn(x[t], y[t])
        for regret, bound in zip(experts.regret, experts.bound, strict=True):
            assert regret <= bound * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", SHARES[1:])
def test_the_bound_holds_on_every_interval(kind, share):
    """From any round on: the sum over the interval, and -ln(α W) / η at its beginning."""
    y, x = series(kind, 150, 7)
    experts, past = uniform(3, share), []
    for t in range(150):
        experts.learn(x[t], y[t])
        regret, spent, scales = (np.array(v) for v in (experts.regret, experts._spent, experts._scales))
        owed = -(math.log(share) + experts.log_potential) * scales / 0.2
        end = (experts.log_potential + math.log(3)) * scales / 0.2
        for regret_then, spent_then, owed_then in past:
            assert np.all(regret - regret_then <= end + owed_then + spent - spent_then + 1e-9)
        past.append((regret, spent, owed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", SHARES)
def test_the_potential_stays_as_small_as_the_docstring_says(kind, share):
    y, x = series(kind, 250, 6)
    experts, surprises, falls = uniform(3, share), 1, 0.0  # the first round counts as one
    for t in range(250):
        before, weights = np.array(experts._scales), np.array(experts.weights)
        experts.learn(x[t], y[t])
        if before.any():
            q = weights @ x[t]
            r = experts.counted * 2 * (q - y[t]) * (q - x[t])
            surprises += bool(np.any(abs(r) > 2.5 * before))
            falls += np.mean(np.maximum(np.array(experts._scales) / before - 1.0, 0.0)) / math.e
        assert experts.log_potential <= surprises / 4 + math.log(1 + falls) + 1e-9


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=60),
    st.sampled_from([0.0, 0.002, 0.2]),
)
def test_the_excess_of_the_loss_itself_is_bounded_whatever_comes(rounds, share):
    """Over each expert by its bound less the curvature, and over their average, in the rounds' own weights κ."""
    y, *x = np.array(rounds).T
    x, experts = np.array(x).T, uniform(2, share)
    excess, curvature, over_average = np.zeros(2), np.zeros(2), 0.0
    for yt, xt in zip(y, x, strict=True):
        q = np.array(experts.weights) @ xt
        experts.learn(xt, yt)
        excess += experts.counted * ((q - yt) ** 2 - (xt - yt) ** 2)
        curvature += experts.counted * (q - xt) ** 2
        over_average += experts.counted * ((q - yt) ** 2 - (xt.mean() - yt) ** 2)
    bounds = np.array(experts.bound)
    if np.isinf(bounds).any():
        assert abs(excess).max() < 1e-9
        return
    assert np.all(excess <= bounds - curvature + 1e-9)
    assert over_average <= bounds.mean() + 1e-9


def test_an_expert_that_happens_to_equal_the_mixture_does_not_keep_all_the_weight():
    """Exactly between the two others in the first round, and the worst of all from then on."""
    rng = np.random.default_rng(3)
    experts = uniform(3)
    experts.learn((-1.0, 0.0, 1.0), 0.5)
    assert experts.weights[1] > 0.9
    for y in rng.normal(0, 0.1, 60):
        experts.learn((y + rng.normal(0, 0.01), y + 1.0, y + rng.normal(0, 0.1)), y)
    assert experts.weights[1] < 0.05


def test_the_weight_moves_when_another_expert_becomes_the_best_however_late():
    """A change after 10,000 rounds is followed within 150, as one after 1,000 is."""
    for rounds in (1000, 10_000):
        rng = np.random.default_rng(8)
        experts = uniform(2)
        for t in range(rounds + 150):
            good, bad = rng.normal(0, 0.03), rng.normal(0, 0.05)
            experts.learn((good, bad) if t < rounds else (bad, good), 0.0)
        assert experts.weights[1] > 0.6


def test_rates_rise_again_when_errors_have_become_small():
    """The scale of ten times larger errors is gone after 1,000 rounds."""
    rng = np.random.default_rng(9)
    experts = uniform(2)
    for t in range(2000):
        experts.learn(rng.normal(0, 0.3 if t < 1000 else 0.03, 2), 0.0)
    assert max(experts._scales) < 0.05 * 0.3**2


def test_one_outlier_moves_no_weight_by_more_than_a_round_of_the_largest_size_lately():
    rng = np.random.default_rng(10)
    experts = uniform(2)
    for _ in range(200):
        experts.learn(rng.normal(0, 0.03, 2), 0.0)
    scale, before = max(experts._scales), experts.weights
    experts.learn((0.02, -0.02), -7.0)
    assert experts.counted < 0.1
    assert max(experts._scales) <= 1.5 * scale
    assert abs(experts.weights[0] - before[0]) < 0.2


def test_a_scale_that_changes_for_good_is_taken_in():
    """Errors a hundred times larger, so advantages 10,000 times: all count whole within 40 rounds."""
    rng = np.random.default_rng(11)
    experts, counted = uniform(2), []
    for t in range(300):
        experts.learn(rng.normal(0, 0.01 if t < 200 else 1.0, 2), 0.0)
        counted.append(experts.counted)
    assert min(counted[200:230]) < 0.1
    assert np.mean(np.array(counted[240:]) > 0.5) > 0.9


def test_the_share_keeps_a_bad_expert_from_being_buried():
    """e_k never falls below share times the mean, however long an expert was bad; without a share it does."""
    floors = []
    for share in (0.002, 0.0):
        experts = uniform(2, share)
        for _ in range(500):
            experts.learn((0.0, 1.0), -0.01)
        floors.append(experts._log_e[1] - experts.log_potential)
    assert floors[0] >= math.log(0.002) - 1e-6 > floors[1]


def test_experts_whose_errors_cancel_are_averaged():
    rng = np.random.default_rng(12)
    experts, errors = uniform(2), []
    for wobble in np.where(rng.random(400) < 0.5, 0.1, -0.1):
        w = experts.weights
        errors.append(w[0] * wobble - w[1] * wobble)
        experts.learn((wobble, -wobble), 0.0)
    assert experts.weights == pytest.approx((0.5, 0.5), abs=0.1)
    assert np.abs(errors[200:]).max() < 0.03


def test_a_state_with_bad_numbers_is_refused_and_a_good_one_goes_on_alike():
    y, x = series("noise", 60, 13)
    experts = uniform(3)
    for t in range(30):
        experts.learn(x[t], y[t])
    state = experts.state()
    for key, value in (("log_e", [0.0]), ("spent", [0.0, 0.0, math.inf]), ("scales", [-1.0, 1.0, 1.0])):
        with pytest.raises(ValueError, match="state: "):
            uniform(3).restore(state | {key: value})
    with pytest.raises(ValueError, match="the prior must be above 0"):
        uniform(3).restore(state | {"prior": [0.0, 0.5, 0.5]})
    other = uniform(3)
    other.restore(state)
    for t in range(30, 60):
        experts.learn(x[t], y[t])
        other.learn(x[t], y[t])
    assert other.weights == experts.weights
    assert other.bound == experts.bound
