"""Learning rates by epoch and by step, on an optimizer that only keeps its rate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("horovod.tensorflow")

from keras_callbacks import LearningRateSchedule


def rates(*schedules, epochs, steps=4):
    """The rate before every step."""
    optimizer = SimpleNamespace(learning_rate=0.0)
    found = []
    for schedule in schedules:
        schedule.set_model(SimpleNamespace(optimizer=optimizer))
        schedule.set_params({"steps": steps})
    for epoch in range(epochs):
        for schedule in schedules:
            schedule.on_epoch_begin(epoch)
        for step in range(steps or 1):
            for schedule in schedules:
                schedule.on_train_batch_begin(step)
            found.append(optimizer.learning_rate)
    return found


def test_a_staircase_changes_once_an_epoch():
    assert rates(LearningRateSchedule(0.5, lambda epoch: 2.0**-epoch), epochs=2) == [0.5] * 4 + [0.25] * 4


def test_a_smooth_schedule_changes_with_every_step():
    smooth = LearningRateSchedule(1.0, lambda epoch: epoch, staircase=False)
    assert rates(smooth, epochs=2) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]


def test_schedules_follow_one_another_and_the_last_rate_stays():
    one, two = LearningRateSchedule(1.0, 0.1, end_epoch=1), LearningRateSchedule(1.0, 0.01, start_epoch=1, end_epoch=2)
    assert rates(one, two, epochs=3, steps=1) == [0.1, 0.01, 0.01]


def test_a_smooth_schedule_needs_the_length_of_an_epoch():
    smooth = LearningRateSchedule(1.0, lambda epoch: epoch, staircase=False)
    smooth.set_model(SimpleNamespace(optimizer=SimpleNamespace(learning_rate=0.0)))
    smooth.set_params({"steps": None})
    with pytest.raises(ValueError, match="steps_per_epoch"):
        smooth.on_train_batch_begin(1)


@pytest.mark.parametrize("rate", [0.0, -0.1, float("nan")])
def test_a_rate_to_multiply_is_positive(rate):
    with pytest.raises(ValueError, match="initial_lr"):
        LearningRateSchedule(rate, 0.1)
