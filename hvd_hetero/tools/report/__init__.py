"""A report of a recorded run: where the time went, which rank cost how much, and what would help."""

from hvd_hetero.tools.report.figures import Figures, figures

__all__ = ["Figures", "figures"]
