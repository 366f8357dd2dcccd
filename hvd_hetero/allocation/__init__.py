"""Solvers for each worker's samples: shares by speed, and the split whose latest worker is as early as possible."""

from typing import TYPE_CHECKING

from hvd_hetero.lazy import lazily

if TYPE_CHECKING:
    from hvd_hetero.allocation.equal_times import adapt, settled
    from hvd_hetero.allocation.gamma import Gamma, fit_gamma
    from hvd_hetero.allocation.largest_remainder import proportional
    from hvd_hetero.allocation.linear_program import minimax_lp
    from hvd_hetero.allocation.problem import Allocation, SolverFailure
    from hvd_hetero.allocation.water_filling import minimax

__all__ = [
    "Allocation",
    "Gamma",
    "SolverFailure",
    "adapt",
    "fit_gamma",
    "minimax",
    "minimax_lp",
    "proportional",
    "settled",
]

__getattr__ = lazily(__name__)
