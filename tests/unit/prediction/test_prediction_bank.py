"""A bank forecasts what n predictors forecast."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvd_hetero.prediction import EMA, NARX, Memoryless, Mixture, Reverting
from hvd_hetero.prediction.banks import bank_of

NO_SPEED = [math.nan, 0.0, -3.0, math.inf]
KINDS = {
    "memoryless": Memoryless,
    "ema": EMA,
    "ema 0.7": lambda: EMA(0.7),
    "reverting": Reverting,
    "mixture": Mixture,
    "mixture of two": lambda: Mixture([EMA(0.05), Reverting()]),
}


def series(seed: int, strange_by: float = 10.0, ranks: int = 6, rounds: int = 700) -> np.ndarray:
    """Speeds that scatter, wander, jump, stand still or come from another world for a round; some are missing."""
    rng = np.random.default_rng(seed)
    speeds = np.exp(rng.normal(scale=[0.0, 0.01, 0.05, 0.3, 0.05, 0.05], size=(rounds, ranks)))
    speeds *= np.exp(np.cumsum(rng.normal(scale=[0.0, 0.0, 0.02, 0.0, 0.0, 0.0], size=(rounds, ranks)), axis=0))
    jumps = np.where(rng.random((rounds, ranks)) < 0.02, rng.normal(scale=1.0, size=(rounds, ranks)), 0.0)
    speeds[:, 4:] *= np.exp(np.cumsum(jumps, axis=0))[:, 4:]
    strange = rng.random((rounds, ranks)) < 0.005
    speeds[strange] *= rng.choice([1.0 / strange_by, strange_by], strange.sum())
    missing = rng.random((rounds, ranks)) < 0.05
    missing[:20, 3] = True  # this one begins later
    speeds[missing] = rng.choice(NO_SPEED, missing.sum())
    return 100.0 * speeds


@pytest.mark.parametrize(("strange_by", "within"), [(10.0, 1e-12), (1000.0, 1e-10)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_forecast_is_that_of_the_predictors(kind, strange_by, within):
    """Only the last bits of logarithms differ; a round a thousand times too fast makes more of them."""
    speeds = series(int(strange_by), strange_by)
    alone = [KINDS[kind]() for _ in range(speeds.shape[1])]
    bank = bank_of(KINDS[kind](), speeds.shape[1])
    assert bank is not None
    for round_of in speeds:
        bank.update(round_of)
        for predictor, speed in zip(alone, round_of, strict=True):
            predictor.update(float(speed))
        expected = [predictor.predict() for predictor in alone]
        np.testing.assert_allclose(bank.expected, expected, rtol=within)


@pytest.mark.parametrize(("scatter", "struck_by", "within"), [(1e-5, 1e4, 1e-10), (0.03, 1e200, 1e-8)], ids=str)
def test_a_mixture_that_a_strange_round_has_struck_is_that_of_the_predictors(scatter, struck_by, within):
    """Where rounds scatter little, and where squares of errors are beyond the largest number."""
    speeds = 100.0 * np.exp(np.random.default_rng(3).normal(0, scatter, (120, 2)))
    speeds[60] *= struck_by
    bank, alone = bank_of(Mixture(), 2), [Mixture(), Mixture()]
    for round_of in speeds:
        bank.update(round_of)
        for predictor, speed in zip(alone, round_of.tolist(), strict=True):
            predictor.update(speed)
        np.testing.assert_allclose(bank.expected, [predictor.predict() for predictor in alone], rtol=within)


def test_ranks_do_not_mind_what_the_others_measure():
    """The same series alone and among others, bit by bit."""
    speeds = series(7)
    together, alone = bank_of(Mixture(), 6), bank_of(Mixture(), 1)
    for round_of in speeds:
        together.update(round_of)
        alone.update(round_of[3:4])
        assert together.expected[3] == alone.expected[0] or np.isnan(alone.expected[0])


@pytest.mark.parametrize(
    "of",
    [
        Reverting(drivers=True),
        Mixture(drivers=True),
        Mixture([Reverting(drivers=True), EMA()]),
        NARX(background=False),
    ],
    ids=["reverting with drivers", "mixture with drivers", "a member with drivers", "narx"],
)
def test_there_is_no_bank_of_what_goes_by_drivers(of):
    assert bank_of(of, 3) is None


def test_there_is_no_bank_of_what_has_learnt_something():
    """It would begin again."""
    mixture = Mixture()
    mixture.update(3.0)
    assert bank_of(mixture, 2) is None


def test_a_subclass_has_no_bank():
    """It may do something else."""

    class Cautious(EMA):
        def _forecast(self, cpu: float, memory: float) -> float:
            return 0.5 * super()._forecast(cpu, memory)

    assert bank_of(Cautious(), 2) is None
    assert bank_of(Mixture([Memoryless(), Cautious()]), 2) is None
