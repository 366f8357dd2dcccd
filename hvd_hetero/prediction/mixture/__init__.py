"""The mixture of predictors, its member that is not in the papers, and its weights."""

from hvd_hetero.prediction.mixture.mixture import Mixture
from hvd_hetero.prediction.mixture.reverting import Reverting

__all__ = ["Mixture", "Reverting"]
