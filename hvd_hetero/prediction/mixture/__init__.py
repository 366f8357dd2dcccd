"""The mixture of predictors, and its member that is not in the papers."""

from hvd_hetero.prediction.mixture.mixture import Mixture
from hvd_hetero.prediction.mixture.reverting import Reverting

__all__ = ["Mixture", "Reverting"]
