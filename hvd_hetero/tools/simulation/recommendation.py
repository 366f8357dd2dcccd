r"""Which scheme to take when figures are uncertain.

Scheme j gains r_j times BSP's samples per second, give or take e_j: uncertainty from the fit of a recorded run, and two
standard errors of the ups and downs that the simulation met. The scheme with the largest r_j - e_j is recommended. Then
no other is better by more than its error:

    r_i - e_i <= r_j - e_j <= r_j          for all i

If a loss was asked for, and some scheme reaches it, r_j is how many times sooner than BSP it does, and schemes
that never do are out. Else samples per second say nothing about updates, so the text mentions much longer ones.

Schemes that exist only in simulation, and the best possible split, are not recommended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hvd_hetero.tools.simulation.compare import Outcome

__all__ = ["recommended", "told"]

_VISIBLE = 0.01  # figures are shown with two digits
_LONGER = 1.2  # times BSP's updates; longer ones are mentioned (arbitrary)


def recommended(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the scheme that is best even if it is worse than it seems by its error; BSP counts, and gains 1."""
    judged = _by_time_to_loss(outcomes) or outcomes
    usable = [outcome for outcome in judged if outcome.usable and math.isfinite(outcome.times_bsp)]
    return max(usable, key=lambda outcome: outcome.times_bsp - _error(outcome))


def told(outcomes: Sequence[Outcome]) -> str:
    """Return the recommendation as a sentence, with what might be better still."""
    best, bsp = recommended(outcomes), next(o for o in outcomes if o.scheme == "bsp")
    judged = _by_time_to_loss(outcomes)
    gain = "" if best.scheme == "bsp" else f"{best.times_bsp:.2f} of bsp, ± {_error(best):.2f}; "
    if judged:
        gain = f"{best.time_to_loss_s:.1f} s to the target loss; "
    text = f"{best.scheme}: {gain}nothing else is {'sooner' if judged else 'better'} by more than its error"
    if not judged and best.round_s > _LONGER * bsp.round_s:
        text += f". Its updates take {best.round_s / bsp.round_s:.1f} times as long as those of bsp, so there are fewer"
    above = best.times_bsp + _error(best) + _VISIBLE
    if perhaps := [
        o for o in judged or outcomes if o.usable and o.scheme != best.scheme and o.times_bsp + _error(o) > above
    ]:
        other = max(perhaps, key=lambda outcome: outcome.times_bsp + _error(outcome))
        least = max(other.times_bsp - _error(other), 0.0)
        text += f". {other.scheme} lies between {least:.2f} and {other.times_bsp + _error(other):.2f}"
    if not judged and bsp.time_to_loss_s is not None:
        text += ". No scheme reaches the target loss, so this goes by samples per second"
    return text + "."


def _by_time_to_loss(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the schemes that reach the chosen loss, with gains in time to it; none if no usable one does."""
    reach = {
        o.scheme: o.time_to_loss_s
        for o in outcomes
        if o.usable and o.time_to_loss_s is not None and math.isfinite(o.time_to_loss_s)
    }
    reference = reach.get("bsp", max(reach.values(), default=math.nan))
    sooner = [(o, reference / reach[o.scheme]) for o in outcomes if o.scheme in reach]
    return [replace(o, times_bsp=gain, error=_error(o) / o.times_bsp * gain) for o, gain in sooner]


def _error(outcome: Outcome) -> float:
    return outcome.error if math.isfinite(outcome.error) else 0.0
