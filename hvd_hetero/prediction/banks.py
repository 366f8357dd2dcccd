"""Which predictors have a bank."""

from __future__ import annotations

from hvd_hetero.prediction.bank import Bank, EMAs, Memorylesses
from hvd_hetero.prediction.base import Predictor
from hvd_hetero.prediction.ema import EMA
from hvd_hetero.prediction.memoryless import Memoryless
from hvd_hetero.prediction.mixture.bank import Mixtures, Revertings
from hvd_hetero.prediction.mixture.mixture import Mixture
from hvd_hetero.prediction.mixture.reverting import Reverting

__all__ = ["bank_of"]


def bank_of(predictor: Predictor, ranks: int) -> Bank | None:
    """Return the bank of so many predictors like this one; None: it has learnt something, uses drivers, or has none."""
    kind = type(predictor)
    if predictor.rounds or predictor.uses_drivers:
        return None
    if kind is Memoryless:
        return Memorylesses(ranks)
    if kind is Reverting:
        return Revertings(ranks)
    if isinstance(predictor, EMA) and kind is EMA:
        return EMAs(predictor, ranks)
    if isinstance(predictor, Mixture) and kind is Mixture:
        members = [bank for member in predictor.members if (bank := bank_of(member, ranks)) is not None]
        if len(members) == len(predictor.members):
            return Mixtures(members, ranks)
    return None
