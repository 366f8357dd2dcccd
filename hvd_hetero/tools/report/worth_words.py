"""What each rank is worth, as a table and in sentences: for reports, and for ``hvd-hetero simulate --worth``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_hetero.tools.report.table import Table
from hvd_hetero.tools.report.words import number
from hvd_hetero.tools.simulation.worth import Rate, Worth

_NOTABLE = 0.01  # of the speed; less is no reason to leave a rank out
_MANY = 2.0  # times as fast, and no percentage
_UNSEEN = 0.005  # of the speed: it would be rounded to 0 %


def worth_table(worth: Worth, prices: Sequence[float] = ()) -> Table:
    """Return the table of all ranks, and of the training without each one, the most valuable first."""
    headings: tuple[str, ...] = ("left out", "samples/s", "between", "times all ranks")
    lines = [("none", worth.all, "1.00"), *((f"rank {w.worker}", w.rate, f"{w.times.likely:.2f}") for w in worth.each)]
    rows: list[tuple[str, ...]] = [
        (name, number(rate.likely), f"{number(rate.least)} … {number(rate.most)}", times) for name, rate, times in lines
    ]
    if prices:
        headings = (*headings, "samples per 1 paid")
        bought = [_bought(worth.all, prices), *(_bought(w.rate, prices, w.worker) for w in worth.each)]
        rows = [(*row, number(amount)) for row, amount in zip(rows, bought, strict=True)]
    most = max(rate.likely for _, rate, _ in lines)
    narrow = frozenset({3}) if prices else frozenset()  # what a phone goes without: the money is wanted more
    return Table(headings, tuple(rows), {1: [rate.likely / most for _, rate, _ in lines]}, spare=narrow)


def leave_out(worth: Worth) -> str:
    """Return which rank to leave out, if the training is faster without it beyond doubt; "" if there is none."""
    best = worth.each[-1]
    if best.times.least < 1.0 + _NOTABLE:
        return ""
    return f"Leave out rank {best.worker}: {_gain(best.times)}."


def worth_sentences(worth: Worth, said: str = "") -> list[str]:
    """Return what to do, if it is not ``said``, how many times the fastest rank all are worth, and what tells more."""
    best, whole, told = worth.each[-1], worth.times_fastest, []
    if sure := leave_out(worth):
        told += [] if sure in said else [sure]
    elif best.times.most >= 1.0 + _NOTABLE:
        told.append(
            f"Rank {best.worker} may or may not be worth its place: without it, {_gain(best.times)}. "
            "One minute without it tells."
        )
    else:
        told.append("Every rank is worth its place." if len(worth.each) == worth.workers else "No rank hurts.")
    if len(worth.each) < worth.workers:
        told.append(f"Of {worth.workers:,} ranks, the {len(worth.each)} slowest were asked about.")
    told.append(
        f"All ranks together do {whole.likely:.2f} times ({whole.least:.2f} to {whole.most:.2f}) what "
        f"rank {worth.fastest} does alone."
    )
    if worth.transfer_open:
        told.append(
            "The record does not tell how long fewer ranks take for a transfer. If the slow link is that of the rank "
            "left out, the upper end is near. One minute without a rank tells."
        )
    if worth.fixed_open:
        told.append(
            "The record does not tell what a micro-batch costs besides its samples. Epochs that end with a short round "
            "do."
        )
    return told


def _bought(rate: Rate, prices: Sequence[float], without: int | None = None) -> float:
    """Return the samples for one unit of money; prices are per hour."""
    per_hour = math.fsum(price for rank, price in enumerate(prices) if rank != without)
    return 3600.0 * rate.likely / per_hour if per_hour > 0 else math.inf


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
