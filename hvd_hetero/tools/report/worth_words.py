"""What each rank is worth, in sentences: for reports, and for ``hvd-hetero simulate --worth``."""

from __future__ import annotations

from hvd_hetero.tools.simulation.worth import Rate, Worth

_NOTABLE = 0.01  # of the speed; less is no reason to leave a rank out
_MANY = 2.0  # times as fast, and no percentage
_UNSEEN = 0.005  # of the speed: it would be rounded to 0 %


def leave_out(worth: Worth) -> str:
    """Return which rank to leave out, if the training is faster without it beyond doubt; "" if there is none."""
    best = worth.each[-1]
    if best.times.least < 1.0 + _NOTABLE:
        return ""
    return f"Leave out rank {best.worker}: {_gain(best.times)}."


def worth_sentences(worth: Worth, shown: str = "") -> list[str]:
    """Return whom to leave out, how fast all ranks are beside the fastest one alone, and what would narrow the ranges.

    Advice that the reader has seen already, in ``shown``, is not repeated.
    """
    best, whole, sentences = worth.each[-1], worth.times_fastest, []
    if certain := leave_out(worth):
        sentences += [] if certain in shown else [certain]
    elif best.times.most >= 1.0 + _NOTABLE:
        sentences.append(
            f"Rank {best.worker} may or may not be worth its place: without it, {_gain(best.times)}. "
            "One minute without it tells."
        )
    else:
        sentences.append("Every rank is worth its place." if len(worth.each) == worth.workers else "No rank hurts.")
    if len(worth.each) < worth.workers:
        sentences.append(f"Of {worth.workers:,} ranks, the {len(worth.each)} slowest were asked about.")
    sentences.append(
        f"All ranks together do {whole.likely:.2f} times ({whole.least:.2f} to {whole.most:.2f}) what "
        f"rank {worth.fastest} does alone."
    )
    if worth.transfer_open:
        sentences.append(
            "The record does not tell how long fewer ranks take for a transfer. If the slow link is that of the rank "
            "left out, the upper end is near. One minute without a rank tells."
        )
    if worth.fixed_open:
        sentences.append(
            "The record does not tell what a micro-batch costs besides its samples. Epochs that end with a short round "
            "do."
        )
    return sentences


def _gain(times: Rate) -> str:
    """Return by how much it is faster, or slower: "6 % faster (4 to 8 %)"."""
    if times.most >= _MANY:
        return f"{times.likely:.3g} times as fast ({times.least:.3g} to {times.most:.3g})"
    least, most = _change(times.least), _change(times.most)
    if times.least >= 1.0:
        least, most = least.removesuffix(" % faster"), most.removesuffix(" faster")
    return f"{_change(times.likely)} ({least} to {most})"


def _change(times: float) -> str:
    if abs(times - 1.0) < _UNSEEN:
        return "as fast"
    return f"{abs(times - 1.0) * 100:.0f} % {'faster' if times >= 1.0 else 'slower'}"
