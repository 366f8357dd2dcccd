"""The noise of gradients: both estimators are right whatever the batches are, and the averages follow the training."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hvd_hetero.measurement.gradient_noise import GradientNoise, Noise, noise_of


def square(vector):
    return float(vector @ vector)


def estimated(means, sizes, of=math.inf):
    """Return the estimates from every rank's mean gradient."""
    sizes = np.asarray(sizes, dtype=float)
    return noise_of(
        sizes.tolist(), [square(g) for g in means], square(sizes @ np.asarray(means) / sizes.sum()), epoch_samples=of
    )


def test_over_all_draws_of_a_small_set_both_are_right_exactly():
    """Every way to give 1 and 2 of 6 samples to two ranks, without replacement."""
    samples = np.random.default_rng(0).normal([2.0, -1.0], [1.0, 3.0], (6, 2))
    draws = [
        ([i], [j, k])
        for i in range(6)
        for j, k in itertools.combinations([other for other in range(6) if other != i], 2)
    ]
    found = [estimated([samples[part].mean(axis=0) for part in draw], (1, 2), of=6) for draw in draws]
    assert np.mean([each.variance for each in found]) == pytest.approx(samples.var(axis=0, ddof=1).sum(), rel=1e-12)
    assert np.mean([each.square for each in found]) == pytest.approx(square(samples.mean(axis=0)), rel=1e-12)


@pytest.mark.parametrize("sizes", [(128, 384), (20, 40, 80, 160, 320), (5,) * 8])
def test_no_unbiased_estimate_from_these_means_scatters_less(sizes):
    """Normal noise in 64 directions: sqrt(2 / (64 (n - 1))) of S, however the samples are divided."""
    rng, directions = np.random.default_rng(len(sizes)), 64
    truth = np.full(directions, 0.25)  # |G|² = 4, S = 64
    runs = [estimated([rng.normal(truth, 1.0 / math.sqrt(b)) for b in sizes], sizes) for _ in range(4000)]
    variances, squares = np.array(runs).T
    for values, expected in ((variances, 64.0), (squares, 4.0)):
        assert abs(values.mean() - expected) < 3 * values.std() / math.sqrt(len(runs))
    least = math.sqrt(2 / (directions * (len(sizes) - 1)))
    assert variances.std() / 64.0 == pytest.approx(least, rel=0.05)


def test_the_gradient_itself_adds_nothing_to_the_variance():
    rng = np.random.default_rng(3)
    noise = rng.normal(size=(3, 5))
    shifted = estimated(noise + 100.0, (7, 2, 30)).variance
    assert shifted == pytest.approx(estimated(noise, (7, 2, 30)).variance, rel=1e-9)


def test_a_rank_without_data_does_not_count():
    with_it = noise_of([4.0, 0.0, 8.0], [3.0, 0.0, 2.0], 1.5)
    assert with_it == noise_of([4.0, 8.0], [3.0, 2.0], 1.5)


@pytest.mark.parametrize(
    ("samples", "squares", "square"),
    [([4.0, 0.0], [3.0, 0.0], 3.0), ([4.0, 8.0], [math.nan, 2.0], 1.0), ([4.0, 8.0], [3.0, 2.0], math.inf)],
)
def test_one_rank_alone_or_a_figure_that_is_not_finite_tells_nothing(samples, squares, square):
    assert noise_of(samples, squares, square) is None


def learned(noises):
    found = GradientNoise()
    for noise in noises:
        found.learn(noise)
    return found


def test_numerator_and_denominator_are_averaged_before_they_are_divided():
    found = learned([Noise(8.0, 4.0), Noise(16.0, -1.0), Noise(12.0, 3.0)])
    assert found.scale == pytest.approx(12.0 / 2.0)


def test_the_average_follows_a_training_that_changes():
    before, after = Noise(10.0, 1.0), Noise(10.0, 0.1)
    assert learned([before] * 300 + [after] * 120).scale == pytest.approx(100.0, rel=0.15)
    assert learned([before] * 300 + [after] * 5).scale < 15.0


def test_the_interval_holds_the_scale_in_most_trainings_and_shrinks():
    rng = np.random.default_rng(5)
    held, widths = 0, []
    for _ in range(100):
        found = GradientNoise()
        for t in range(800):
            found.learn(Noise(10.0, rng.normal(1.0, 2.0)))
            if t == 40:
                early = found.scale_between
        low, high = found.scale_between
        held += low <= 10.0 <= high
        widths.append((high - low) / (early[1] - early[0]) if math.isfinite(early[1]) else 0.0)
    assert 0.55 * 100 < held < 0.8 * 100, "one standard error to each side holds 68 %"
    assert np.median(widths) < 0.8


def test_a_gradient_that_is_lost_in_noise_has_an_infinite_scale_and_nothing_known_has_none():
    assert learned([Noise(8.0, -1.0)]).scale == math.inf
    assert math.isnan(GradientNoise().scale)
    assert all(map(math.isnan, learned([Noise(8.0, 1.0)]).scale_between))


def test_a_state_goes_on_where_it_was_saved():
    rng = np.random.default_rng(7)
    noises = [Noise(*rng.normal(5.0, 1.0, 2)) for _ in range(60)]
    resumed = GradientNoise()
    resumed.load_state_dict(learned(noises[:40]).state_dict())
    for noise in noises[40:]:
        resumed.learn(noise)
    assert resumed.state_dict() == learned(noises).state_dict()


def test_squares_beyond_all_numbers_teach_nothing():
    noise = GradientNoise()
    for _ in range(3):
        noise.learn(Noise(4.0, 2.0))
    known = noise.state_dict()
    for beyond in (Noise(math.inf, 1.0), Noise(1.0, 1e160), Noise(math.nan, 1.0)):
        noise.learn(beyond)
    assert noise.state_dict() == known
