"""What terminal and page show alike of a report: its lines and tables of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_hetero.tools.report.attribution import kinds_of
from hvd_hetero.tools.report.build import Report
from hvd_hetero.tools.report.figures import Figures
from hvd_hetero.tools.report.verdict import comparison
from hvd_hetero.tools.report.words import UNKNOWN, duration, listed, number, percent, percents
from hvd_hetero.tools.report.worth_words import worth_sentences
from hvd_hetero.tools.simulation.worth import Rate, Worth

# Of more ranks the table would not fit on a screen: it shows the worst ones, and another the spread of all.
_RANKS_LISTED, _WORST_RANKS_LISTED = 16, 10
_RANKS_NAMED = 4
# A rank that costs less is no reason to look at the network.
_NETWORK_SHOWN_FROM_COST = 0.02
_QUANTILES = {"least": 0.0, "a tenth below": 0.1, "half below": 0.5, "nine tenths below": 0.9, "most": 1.0}
_RANK_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "held others up": ("cost", percent),
    "of this, by data": ("cost_input", percent),
    "slowest in": ("last", percent),
    "samples/s": ("samples_per_s", number),
    "of the fastest": ("of_best_rank", lambda score: f"{score:.2f}" if math.isfinite(score) else UNKNOWN),
    "waiting": ("waiting", percent),
}
_OF_A_SINGLE_RANK = ("samples/s", "waiting")
# Columns with bars, and columns that a narrow screen leaves out.
_BARS, _SPARE = (1, 5), frozenset({2, 3, 4})
_COMPARED: dict[str, Callable[[Figures], str]] = {
    "policy": lambda found: found.policy,
    "ranks": lambda found: f"{found.workers:,}",
    "global batch": lambda found: f"{found.global_batch:,}",
    "rounds": lambda found: f"{found.rounds:,}",
    "samples per second": lambda found: number(found.samples_per_s),
    "slowdown against the ideal": lambda found: f"{found.slowdown:.2f}",
    "waiting for late ranks": lambda found: percent(found.waiting_for_ranks),
    "transfers": lambda found: percent(found.kinds["transfer"]),
    "other work between rounds": lambda found: percent(found.kinds["between"]),
}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings. The first column is on the left, the others are figures."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bars: dict[int, list[float]] = field(default_factory=dict)
    """For a column, the share of each row that a bar shows."""
    spare: frozenset[int] = frozenset()
    """Columns that a narrow screen leaves out."""
    words: frozenset[int] = frozenset()
    """Columns of words, besides the first."""


def contents(report: Report) -> dict[str, Any]:
    """Return what is shown of a run, by the names that the page's template has."""
    found, worth = report.figures, report.worth
    return {
        "name": report.name,
        "facts": _facts(found),
        "verdict": report.verdict,
        "notes": report.notes,
        "tiles": _tiles(found),
        "costs": report.costs,
        "kinds": kinds_table(found),
        "ranks": _ranks_table(found),
        "spread": _spread_table(found) if found.workers > _RANKS_LISTED else None,
        "causes": _causes_table(report),
        "alternatives": _alternatives_table(found),
        "replayed": _replay_note(found),
        "worth": worth and worth_table(worth, report.prices),
        "worth_text": _worth_text(report),
    }


def _worth_text(report: Report) -> str:
    """Return what each rank is worth, in sentences."""
    if report.worth is None:
        return f"Unknown: {report.figures.no_alternatives}"
    return " ".join(worth_sentences(report.worth, report.verdict.next))


def side_by_side(reports: Sequence[Report]) -> dict[str, Any]:
    """Return which of two runs is faster, in words, and a table of both."""
    names, found = [report.name for report in reports], [report.figures for report in reports]
    times = {"samples per second": f"{found[1].samples_per_s / found[0].samples_per_s:.2f} times"}
    rows = tuple((name, *map(of, found), times.get(name, "")) for name, of in _COMPARED.items())
    return {"text": comparison(names, found), "table": Table(("", *names, ""), rows, spare=frozenset({3}))}


def _facts(found: Figures) -> str:
    """Return one line on the run: policy, ranks, rounds."""
    ranks = f"{found.workers:,} rank{'s' if found.workers != 1 else ''}"
    epochs = f", {found.epochs:,} epochs" if found.epochs > 1 else ""
    known = math.isfinite(found.noise_scale)
    noise = f" Gradient noise scale in the last tenth of the rounds: {found.noise_scale:,.0f} samples." if known else ""
    return (
        f"Policy {found.policy}, {ranks}, {found.global_batch:,} samples a round. {found.rounds:,} "
        f"round{'s' if found.rounds != 1 else ''} in {duration(found.elapsed_s)}{epochs}, without the start-up.{noise}"
    )


def _tiles(found: Figures) -> list[tuple[str, str]]:
    """Return the figures that come first: value and name."""
    alone = found.workers == 1
    first = [
        (number(found.samples_per_s), "samples per second"),
        (f"{found.slowdown:.2f}", "slowdown against the ideal"),
        (percent(found.waiting_for_ranks), "waiting for data" if alone else "lost to late ranks"),
        (percent(found.kinds["transfer"]), "synchronising" if alone else "lost to transfers"),
    ]
    if (other := found.alternatives) is not None and (best := other.of("best split")) is not None and best.certain:
        times = best.samples_per_s / other.samples_per_s
        first.append((f"{times:.2f}\N{MULTIPLICATION SIGN}", "as fast with the best split"))
    return first


def kinds_table(found: Figures) -> Table:
    """Return the table of where the time went."""
    names = {"computing (ideal)": found.ideal}
    names |= {name: found.kinds[kind] for kind, name in kinds_of(found.workers).items()}
    shares, round_s = [*names.values()], found.elapsed_s / found.rounds
    times = [duration(share * round_s) for share in shares]
    rows = tuple(zip(names, percents(shares), times, strict=True))
    return Table(("what", "of the time", "in a round"), rows, {1: shares})


def _ranks_table(found: Figures) -> Table:
    """Return the table of each rank, or of the ten that cost most."""
    # A single rank holds none up, and there is none to compare it with.
    names = [*_RANK_COLUMNS] if found.workers > 1 else _OF_A_SINGLE_RANK
    shown = np.arange(found.workers)
    if found.workers > _RANKS_LISTED:
        shown = np.argsort(-found.ranks.cost, kind="stable")[:_WORST_RANKS_LISTED]
    columns = [(getattr(found.ranks, _RANK_COLUMNS[name][0])[shown], _RANK_COLUMNS[name][1]) for name in names]
    rows = tuple((str(rank), *(form(of[i]) for of, form in columns)) for i, rank in enumerate(shown))
    if found.workers == 1:
        return Table(("rank", *names), rows)
    bars = {i: np.nan_to_num(columns[i - 1][0]).tolist() for i in _BARS}
    return Table(("rank", *names), rows, bars, _SPARE)


def _spread_table(found: Figures) -> Table:
    """Return the table of how the figures of all ranks are spread."""
    columns = []
    for name, form in _RANK_COLUMNS.values():
        values = getattr(found.ranks, name)
        known = values[np.isfinite(values)]
        quantiles = np.quantile(known, [*_QUANTILES.values()]) if known.size else [math.nan] * len(_QUANTILES)
        columns.append([form(value) for value in quantiles])
    rows = tuple(zip(_QUANTILES, *columns, strict=True))
    return Table((f"of {found.workers:,} ranks", *_RANK_COLUMNS), rows, spare=_SPARE)


def _alternatives_table(found: Figures) -> Table:
    """Return the table of other splits."""
    headings = ("on these machines", "samples/s", "times this run", "a full round takes")
    if found.alternatives is None:
        return Table(headings, ())
    rate, each = found.alternatives.samples_per_s, found.alternatives.each
    ends = {f"this run ({found.policy})": [rate]}
    ends |= {one.name: [one.samples_per_s] if one.certain else [one.least, one.most] for one in each}
    rows = tuple(
        (
            name,
            " … ".join(map(number, rates)),
            " … ".join(f"{end / rate:.2f}" for end in rates),
            " … ".join(duration(found.global_batch / end) for end in rates[::-1]),
        )
        for name, rates in ends.items()
    )
    fastest = max([rate, *(one.most for one in each)])
    shares = [rate / fastest, *(one.samples_per_s / fastest for one in each)]
    return Table(headings, rows, {1: shares}, spare=frozenset({3}))


def _replay_note(found: Figures) -> str:
    """Return the note on how the table of other splits was computed."""
    if found.alternatives is None:
        return f"Other splits were not computed: {found.no_alternatives}"
    note = (
        f"The last {found.alternatives.rounds} whole rounds were replayed in simulated time, with the speeds and "
        "transfers that they had. (hvd-hetero simulate --from does the same.) Rates leave out the first tenth of the "
        "samples."
    )
    if not all(each.certain for each in found.alternatives.each):
        note += " A figure is a range where this run does not show the fixed cost of a micro-batch."
    if found.micro_batches > 1:
        note += (
            f" This run did up to {found.micro_batches:,} micro-batches a round, and so does its ideal. The splits in "
            "this table do one, so they may be faster than the ideal."
        )
    return note


def _causes_table(report: Report) -> Table:
    """Return the causes of slow ranks, the most costly first; a slow network only for ranks that hold others up."""
    cost = report.figures.ranks.cost
    ranks_by_cause: dict[tuple[str, str], list[int]] = {}
    for rank in np.argsort(-cost, kind="stable").tolist():
        cause = report.causes[rank]
        if cause is not None and (cost[rank] >= _NETWORK_SHOWN_FROM_COST or cause.kind != "network"):
            ranks_by_cause.setdefault((cause.evidence, cause.remedy), []).append(rank)
    rows = tuple(
        (listed(ranks, _RANKS_NAMED), *words) for words, ranks in [*ranks_by_cause.items()][:_WORST_RANKS_LISTED]
    )
    return Table(("rank", "why", "remedy"), rows, words=frozenset({1, 2}))


def worth_table(worth: Worth, prices: Sequence[float] = ()) -> Table:
    """Return the table of all ranks, and of the training without each one, the most valuable first."""
    lines = [("none", worth.all, "1.00", -1)]
    lines += [(f"rank {one.worker}", one.rate, f"{one.times.likely:.2f}", one.worker) for one in worth.each]
    headings: tuple[str, ...] = ("without", "samples/s", "between", "times all ranks")
    rows: list[tuple[str, ...]] = [
        (name, number(rate.likely), f"{number(rate.least)} … {number(rate.most)}", times)
        for name, rate, times, _ in lines
    ]
    if prices:
        headings = (*headings, "samples per 1 paid")
        rows = [
            (*row, number(_bought(rate, prices, left))) for row, (_, rate, _, left) in zip(rows, lines, strict=True)
        ]
    most = max(rate.likely for _, rate, _, _ in lines)
    # Who gives prices wants to see the money on a phone, too.
    narrow = frozenset({3}) if prices else frozenset()
    return Table(headings, tuple(rows), {1: [rate.likely / most for _, rate, _, _ in lines]}, spare=narrow)


def _bought(rate: Rate, prices: Sequence[float], left: int) -> float:
    """Return the samples for one unit of money without this rank; prices are per hour."""
    per_hour = math.fsum(price for rank, price in enumerate(prices) if rank != left)
    return 3600.0 * rate.likely / per_hour if per_hour > 0 else math.inf
