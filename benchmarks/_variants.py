"""LB-BSP as it comes, and without one part of its forecasts each: what `ablation.py` and `speed_torch.py` compare."""

from __future__ import annotations

from collections.abc import Callable

from hvd_hetero.policies import LBBSP
from hvd_hetero.prediction import EMA, NARX, Memoryless, Mixture, Predictor, Reverting


class Following(LBBSP):
    """Without `Steady`: predictions are followed as they are."""

    def forecaster(self, predictor: Predictor) -> Predictor:
        """The predictor alone."""
        return predictor


def members(*others: Predictor) -> Mixture:
    """Memoryless, EMA 0.5, and these."""
    return Mixture([Memoryless(), EMA(0.5), *others])


def narx() -> NARX:
    """As a simulation needs it."""
    return NARX(background=False)


def informed() -> Reverting:
    """The one that reads the CPU."""
    return Reverting(drivers=True)


BASE, WITH_DRIVERS = "LB-BSP as it comes", "with drivers"
Variant = tuple[Callable[[], LBBSP], Callable[[], Predictor]]
VARIANTS: dict[str, Variant] = {
    BASE: (LBBSP, Mixture),
    "without Steady": (Following, Mixture),
    "without Reverting": (LBBSP, lambda: members(EMA(0.2))),
    "of EMA 0.5 and EMA 0.2": (LBBSP, lambda: Mixture([EMA(0.5), EMA(0.2)])),
    "of memoryless and EMA 0.2": (LBBSP, lambda: Mixture([Memoryless(), EMA(0.2)])),
    "without Reverting and Steady": (Following, lambda: members(EMA(0.2))),
    "of EMA 0.5 and EMA 0.2, without Steady": (Following, lambda: Mixture([EMA(0.5), EMA(0.2)])),
    "Reverting alone": (LBBSP, Reverting),
    "EMA 0.2 alone": (LBBSP, EMA),
    "EMA 0.5 alone": (LBBSP, lambda: EMA(0.5)),
    "memoryless alone": (LBBSP, Memoryless),
    "EMA 0.2, without Steady": (Following, EMA),
    "EMA 0.5, without Steady": (Following, lambda: EMA(0.5)),
    "memoryless, without Steady": (Following, Memoryless),
}
DRIVEN: dict[str, Variant] = {
    WITH_DRIVERS: (LBBSP, lambda: Mixture(drivers=True)),
    "with drivers, without Steady": (Following, lambda: Mixture(drivers=True)),
    "with drivers, NARX for Reverting": (LBBSP, lambda: members(narx(), EMA(0.2))),
    "with drivers, and NARX": (LBBSP, lambda: members(informed(), EMA(0.2), narx())),
    "with drivers, Reverting alone": (LBBSP, informed),
    "with drivers, Reverting alone, without Steady": (Following, informed),
    "with drivers, NARX alone": (LBBSP, narx),
}


def policy(name: str) -> LBBSP:
    """The variant as a job takes it: a fresh policy whose ranks predict so."""
    make, predictor = (VARIANTS | DRIVEN)[name]
    return make(predictor())
