"""A device's curve, learned from what training happens to measure: noise, outliers, drift, and sizes never seen."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from hvd_hetero.allocation import Gamma
from hvd_hetero.measurement.device_profile import DeviceProfile

TRUE = Gamma(2e-3, 8e-3, 20, None)
SIZES = (61, 52, 40, 27, 15, 8, 6, 11, 21, 34, 47, 57)


def climbed(profile: DeviceProfile, seconds=TRUE.seconds, sizes=SIZES) -> DeviceProfile:
    """Every size twice, the first time with what buffers and kernels cost then."""
    for size in sizes:
        profile.observe(size, 3 * seconds(size))
        profile.observe(size, seconds(size))
    return profile


def ratio(profile: DeviceProfile, batch: int) -> float:
    return profile.gamma.seconds(batch) / TRUE.seconds(batch)


def test_the_curve_is_found_whatever_the_first_batch_of_each_size_costs():
    gamma = climbed(DeviceProfile(enough=10)).gamma
    assert gamma.slope_s == pytest.approx(TRUE.slope_s)
    assert gamma.intercept_s == pytest.approx(TRUE.intercept_s)
    assert gamma.saturation == pytest.approx(20, abs=1)


def test_no_curve_is_told_before_there_are_enough_sizes_in_a_row():
    profile = climbed(DeviceProfile(enough=10), sizes=SIZES[:9])
    assert profile.gamma is None
    for _ in range(50):
        profile.observe(SIZES[8], TRUE.seconds(SIZES[8]))
    assert profile.gamma is None, "the same size again and again is one size"
    assert climbed(profile, sizes=SIZES[9:10]).gamma is not None


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_an_outlier_leave_the_curve_within_a_tenth(seed):
    rng = np.random.default_rng(seed)
    astray = int(rng.integers(len(SIZES)))
    times = {s: TRUE.seconds(s) * rng.normal(1, 0.02) * (10 if i == astray else 1) for i, s in enumerate(SIZES)}
    profile = climbed(DeviceProfile(enough=12), times.__getitem__)
    for batch in (8, 20, 40, 60, 90):
        assert ratio(profile, batch) == pytest.approx(1, abs=0.1)


def test_times_that_do_not_rise_are_given_up_and_measured_anew():
    profile = climbed(DeviceProfile(enough=12), lambda size: 1.0 - size / 100)
    assert profile.gamma is None
    assert climbed(profile).gamma.slope_s == pytest.approx(TRUE.slope_s)


def test_an_outlier_alone_does_not_move_the_curve():
    profile = climbed(DeviceProfile(enough=12))
    profile.observe(40, TRUE.seconds(40))
    for _ in range(5):
        profile.observe(40, 30 * TRUE.seconds(40))
        for _ in range(2):
            profile.observe(40, TRUE.seconds(40))
    assert ratio(profile, 30) == pytest.approx(1)


def test_a_device_that_slows_down_is_followed_to_nine_tenths_within_twelve_rounds():
    profile = climbed(DeviceProfile(enough=12))
    for _ in range(13):  # the first of a new size is left out
        profile.observe(40, 2 * TRUE.seconds(40))
    assert 1.9 < ratio(profile, 40) < 2.0
    assert ratio(profile, 10) == pytest.approx(ratio(profile, 40)), "the whole curve rises"
    assert profile.gamma.saturation == pytest.approx(20, abs=1)


def test_a_batch_beyond_all_measured_bends_the_curve_instead_of_raising_it():
    """On a device that saturates late, a slope from small batches says nothing of large ones."""
    late = Gamma(2e-3, 8e-3, 70, None)
    rng = np.random.default_rng(0)
    profile = climbed(DeviceProfile(enough=12), lambda size: late.seconds(size) + 1e-6 * size + 1e-5 * rng.random())
    assert profile.gamma.seconds(140) < 0.6 * late.seconds(140)
    for size in (120, 120, 140, 140, 100, 100):
        profile.observe(size, late.seconds(size))
    for size in (100, 120, 140):
        assert profile.gamma.seconds(size) == pytest.approx(late.seconds(size), rel=0.05)
    assert profile.gamma.seconds(30) == pytest.approx(late.seconds(30), rel=0.05)


@pytest.mark.parametrize("measured", [(0, 1.0), (5, 0.0), (5, -1.0), (5, math.nan), (5, math.inf)])
def test_what_is_no_measurement_changes_nothing(measured):
    profile = climbed(DeviceProfile(enough=12))
    profile.observe(40, TRUE.seconds(40))
    before = profile.state_dict()
    profile.observe(*measured)
    assert profile.state_dict() == before


@pytest.mark.parametrize("known", [5, 12])
def test_a_profile_goes_on_from_its_state_as_if_nothing_had_been(known):
    first = climbed(DeviceProfile(enough=12), sizes=SIZES[:known])
    second = DeviceProfile(enough=12)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.gamma == first.gamma
    for profile in (first, second):
        climbed(profile, sizes=SIZES[known:])
        climbed(profile, lambda size: 1.5 * TRUE.seconds(size), sizes=SIZES[:5])
    assert second.gamma == first.gamma is not None


def cliff(size: int) -> float:
    """Above 45, the device has no memory left to be fast."""
    return TRUE.seconds(size) * (3 if size > 45 else 1)


def test_batches_that_hardly_fit_do_not_bend_the_curve():
    profile = climbed(DeviceProfile(enough=12), cliff)
    assert ratio(profile, 30) == pytest.approx(1.0)
    assert profile.gamma.out_of_memory is None
    climbed(profile, sizes=SIZES * 2)
    assert ratio(profile, 30) == pytest.approx(1.0)
