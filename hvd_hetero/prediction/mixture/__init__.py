"""The mixture of predictors, its members that are not in the papers, and its weights."""

from hvd_hetero.prediction.mixture.carried import Carried
from hvd_hetero.prediction.mixture.mixture import Mixture
from hvd_hetero.prediction.mixture.reverting import Reverting

__all__ = ["Carried", "Mixture", "Reverting"]
