r"""Which scheme to take when figures are uncertain.

Scheme j gains r_j times BSP's samples per second, give or take e_j: uncertainty from the fit of a recorded run, and two
standard errors of the ups and downs that the simulation met. The scheme with the largest r_j - e_j is recommended. Then
no other is better by more than its error:

    r_i - e_i <= r_j - e_j <= r_j          for all i

Samples per second say nothing about updates, so the text mentions much longer ones.

Schemes that exist only in simulation, and the best possible split, are not recommended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_hetero.tools.simulation.compare import Outcome

_VISIBLE = 0.01  # figures are shown with two digits
_LONGER = 1.2  # times BSP's updates; longer ones are mentioned (arbitrary)


def recommended(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the scheme that is best even if it is worse than it seems by its error; BSP counts, and gains 1."""
    usable = [outcome for outcome in outcomes if outcome.usable and math.isfinite(outcome.times_bsp)]
    return max(usable, key=lambda outcome: outcome.times_bsp - _error(outcome))


def told(outcomes: Sequence[Outcome]) -> str:
    """Return the recommendation as a sentence, with what might be better still."""
    best, bsp = recommended(outcomes), next(o for o in outcomes if o.scheme == "bsp")
    gain = "" if best.scheme == "bsp" else f"{best.times_bsp:.2f} of bsp, ± {_error(best):.2f}; "
    text = f"{best.scheme}: {gain}nothing else is better by more than its error"
    if best.round_s > _LONGER * bsp.round_s:
        text += f". Its updates take {best.round_s / bsp.round_s:.1f} times as long as those of bsp, so there are fewer"
    above = best.times_bsp + _error(best) + _VISIBLE
    if perhaps := [o for o in outcomes if o.usable and o.scheme != best.scheme and o.times_bsp + _error(o) > above]:
        other = max(perhaps, key=lambda outcome: outcome.times_bsp + _error(outcome))
        least = max(other.times_bsp - _error(other), 0.0)
        text += f". {other.scheme} lies between {least:.2f} and {other.times_bsp + _error(other):.2f}"
    return text + "."


def _error(outcome: Outcome) -> float:
    return outcome.error if math.isfinite(outcome.error) else 0.0
