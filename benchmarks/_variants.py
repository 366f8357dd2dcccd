"""LB-BSP as it comes, and without one part of its forecasts each: what `ablation.py` and `speed_torch.py` compare."""

from __future__ import annotations

from collections.abc import Callable

from hvd_hetero.policies import LBBSP
from hvd_hetero.prediction import EMA, NARX, Memoryless, Mixture, Predictor, Reverting


def members(*others: Predictor) -> Mixture:
    """Return a mixture of memoryless, EMA 0.5, and these."""
    return Mixture([Memoryless(), EMA(0.5), *others])


def narx() -> NARX:
    """Return NARX as a simulation needs it."""
    return NARX(background=False)


def informed() -> Reverting:
    """Return the member that reads the CPU."""
    return Reverting(drivers=True)


BASE, WITH_DRIVERS = "LB-BSP as it comes", "with drivers"
Variant = Callable[[], Predictor]
VARIANTS: dict[str, Variant] = {
    BASE: Mixture,
    "without memoryless": lambda: Mixture([EMA(0.5), Reverting()]),
    "without EMA 0.5": lambda: Mixture([Memoryless(), Reverting()]),
    "without Reverting": members,
    "and EMA 0.2": lambda: members(Reverting(), EMA(0.2)),
    "Reverting alone": Reverting,
    "EMA 0.2 alone": EMA,
    "EMA 0.5 alone": lambda: EMA(0.5),
    "memoryless alone": Memoryless,
}
DRIVEN: dict[str, Variant] = {
    WITH_DRIVERS: lambda: Mixture(drivers=True),
    "with drivers, NARX for Reverting": lambda: members(narx()),
    "with drivers, and NARX": lambda: members(informed(), narx()),
    "with drivers, Reverting alone": informed,
    "with drivers, NARX alone": narx,
}


def policy(name: str) -> LBBSP:
    """Return the variant as a job takes it: a fresh policy whose ranks predict so."""
    return LBBSP((VARIANTS | DRIVEN)[name]())
