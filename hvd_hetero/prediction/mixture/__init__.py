"""The mixture of predictors, and its member that comes from no paper."""

from hvd_hetero.prediction.mixture.mixture import Mixture
from hvd_hetero.prediction.mixture.reverting import Reverting

__all__ = ["Mixture", "Reverting"]
