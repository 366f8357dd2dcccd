"""What each rank is worth, in sentences: for reports, and for ``hvd-hetero simulate --worth``."""

from __future__ import annotations

from hvd_hetero.tools.simulation.worth import Rate, Worth

# For less than 1 % nobody changes a job.
_GAIN_WORTH_A_CHANGE = 0.01
# "3 times as fast" is read more easily than "200 % faster".
_TIMES_FROM = 2.0
# It would be rounded to 0 %.
_AS_FAST_WITHIN = 0.005


def leave_out_advice(worth: Worth) -> str:
    """Return which rank to leave out, if the training is faster without it beyond doubt; "" if there is none."""
    best = worth.each[-1]
    if best.times.least < 1.0 + _GAIN_WORTH_A_CHANGE:
        return ""
    return f"Leave out rank {best.worker}: {_gain(best.times)}."


def worth_sentences(worth: Worth, shown: str = "") -> list[str]:
    """Return whom to leave out, how fast all ranks are beside the fastest one alone, and what would narrow the ranges.

    Advice that the reader has seen already, in ``shown``, is not repeated.
    """
    best, whole, sentences = worth.each[-1], worth.times_fastest, []
    if certain := leave_out_advice(worth):
        sentences += [] if certain in shown else [certain]
    elif best.times.most >= 1.0 + _GAIN_WORTH_A_CHANGE:
        sentences.append(
            f"Without rank {best.worker} the training may be faster or slower, most likely {_gain(best.times)}. "
            "Train for a minute without it to find out."
        )
    else:
        sentences.append("Without any one of these ranks the training would be slower.")
    if len(worth.each) < worth.workers:
        sentences.append(f"Only the {len(worth.each)} slowest of {worth.workers:,} ranks were looked at.")
    sentences.append(
        f"All ranks together are {whole.likely:.2f} times ({whole.least:.2f} to {whole.most:.2f}) as fast as "
        f"rank {worth.fastest} alone."
    )
    if worth.transfer_open:
        sentences.append(
            "How long transfers of fewer ranks take cannot be seen in this run. If the rank that is left out has "
            "the slow link, expect the upper end of the range. Train for a minute without it to find out."
        )
    if worth.fixed_open:
        sentences.append(
            "The fixed cost of a micro-batch cannot be seen in this run, so ranges are wide. Record epochs that end "
            "with a short round."
        )
    return sentences


def _gain(times: Rate) -> str:
    """Return by how much it is faster, or slower: "6 % faster (4 to 8 %)"."""
    if times.most >= _TIMES_FROM:
        return f"{times.likely:.3g} times as fast ({times.least:.3g} to {times.most:.3g})"
    least, most = _change(times.least), _change(times.most)
    if times.least >= 1.0:
        least, most = least.removesuffix(" % faster"), most.removesuffix(" faster")
    return f"{_change(times.likely)} ({least} to {most})"


def _change(times: float) -> str:
    if abs(times - 1.0) < _AS_FAST_WITHIN:
        return "as fast"
    return f"{abs(times - 1.0) * 100:.0f} % {'faster' if times >= 1.0 else 'slower'}"
