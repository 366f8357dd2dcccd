"""The tables of a report, as text: the terminal and the page print the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hvd_hetero.tools.report.attribution import kinds_of
from hvd_hetero.tools.report.figures import Figures, RankFigures
from hvd_hetero.tools.report.made import Report
from hvd_hetero.tools.report.table import Table
from hvd_hetero.tools.report.words import UNKNOWN, duration, listed, number, percent, percents

MOST_RANKS = 16
"""With more ranks, the table shows the worst ones, and their spread."""

_WORST = 10
_NAMED = 4
_WORTH_A_WORD = 0.02
_QUANTILES = {"least": 0.0, "a tenth below": 0.1, "half below": 0.5, "nine tenths below": 0.9, "most": 1.0}


def kinds_table(found: Figures) -> Table:
    """Return the table of where the time went."""
    round_s = found.elapsed_s / found.rounds
    lines = [
        ("computing: the ideal", found.ideal),
        *((name, found.kinds[kind]) for kind, name in kinds_of(found.workers).items()),
    ]
    told = percents([share for _, share in lines])
    rows = tuple((name, text, duration(share * round_s)) for (name, share), text in zip(lines, told, strict=True))
    return Table(("what", "share of the time", "in a round"), rows, {1: [share for _, share in lines]})


def ranks_table(found: Figures) -> Table:
    """Return the table of each rank, or of the ten that cost most."""
    ranks = found.ranks
    shown = np.arange(found.workers)
    if found.workers > MOST_RANKS:
        shown = np.argsort(-ranks.cost, kind="stable")[:_WORST]
    columns = _columns(ranks)
    rows = tuple((str(r), *(form(values[r]) for _, values, form in columns)) for r in shown.tolist())
    bars = {i: np.nan_to_num(columns[i - 1][1][shown]).tolist() for i in (1, 5)}
    table = Table(("rank", *(heading for heading, _, _ in columns)), rows, bars, spare=frozenset({2, 3, 4}))
    return table if found.workers > 1 else _without_others(table)


def _without_others(table: Table) -> Table:
    """Leave out what a single rank cannot have: ranks to hold up, to come after, and to compare with."""
    kept = [0, *(i for i in range(1, len(table.headings)) if i not in (1, 2, 3, 5))]
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    bars = {kept.index(i): bar for i, bar in table.bars.items() if i in kept}
    return Table(tuple(table.headings[i] for i in kept), rows, bars)


def spread_table(found: Figures) -> Table:
    """Return the table of how the figures of all ranks are spread."""
    columns = _columns(found.ranks)
    spread = []
    for _, values, _ in columns:
        known = values[np.isfinite(values)]
        spread.append(np.quantile(known, [*_QUANTILES.values()]) if known.size else [math.nan] * len(_QUANTILES))
    rows = tuple(
        (name, *(columns[i][2](spread[i][q]) for i in range(len(columns)))) for q, name in enumerate(_QUANTILES)
    )
    return Table((f"of {found.workers:,} ranks", *(h for h, _, _ in columns)), rows, spare=frozenset({2, 3, 4}))


def _columns(ranks: RankFigures) -> list[tuple[str, npt.NDArray[np.float64], Callable[[float], str]]]:
    return [
        ("held others up", ranks.cost, percent),
        ("by its data", ranks.cost_input, percent),
        ("came last in", ranks.last, percent),
        ("samples/s", ranks.samples_per_s, number),
        ("of the best rank", ranks.of_best_rank, _score),
        ("waiting", ranks.waiting, percent),
    ]


def _score(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else UNKNOWN


def alternatives_table(found: Figures) -> Table:
    """Return the table of other splits."""
    headings = ("on these machines", "samples/s", "times this run", "a full round takes")
    if found.alternatives is None:
        return Table(headings, ())
    rate = found.alternatives.samples_per_s
    rows = [(f"this run ({found.policy})", number(rate), "1.00", duration(found.global_batch / rate))]
    fastest = max([rate, *(each.most for each in found.alternatives.each)])
    for each in found.alternatives.each:
        ends = [each.samples_per_s] if each.certain else [each.least, each.most]
        rows.append(
            (
                each.name,
                " … ".join(number(end) for end in ends),
                " … ".join(f"{end / rate:.2f}" for end in ends),
                " … ".join(duration(found.global_batch / end) for end in ends[::-1]),
            )
        )
    shares = [rate / fastest, *(each.samples_per_s / fastest for each in found.alternatives.each)]
    return Table(headings, tuple(rows), {1: shares}, spare=frozenset({3}))


def causes_table(report: Report) -> Table:
    """Return the named causes, the most costly ranks first; a slow network only for ranks that hold others up."""
    cost = report.figures.ranks.cost
    caused = [
        (rank, cause)
        for rank, cause in enumerate(report.causes)
        if cause is not None and (cost[rank] >= _WORTH_A_WORD or cause.kind != "network")
    ]
    caused.sort(key=lambda each: -cost[each[0]])
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, cause in caused:
        alike.setdefault((cause.evidence, cause.way_out), []).append(rank)
    rows = tuple((listed(ranks, _NAMED), *words) for words, ranks in [*alike.items()][:_WORST])
    return Table(("rank", "why", "way out"), rows, words=frozenset({1, 2}))


def comparison_table(reports: Sequence[Report]) -> Table:
    """Return the table of two runs side by side."""
    one, other = (report.figures for report in reports)
    lines = [
        ("policy", [each.policy for each in (one, other)], ""),
        ("ranks", [f"{each.workers:,}" for each in (one, other)], ""),
        ("global batch", [f"{each.global_batch:,}" for each in (one, other)], ""),
        ("rounds", [f"{each.rounds:,}" for each in (one, other)], ""),
        (
            "samples per second",
            [number(each.samples_per_s) for each in (one, other)],
            f"{other.samples_per_s / one.samples_per_s:.2f} times",
        ),
        ("slowdown against the ideal", [f"{each.slowdown:.2f}" for each in (one, other)], ""),
        ("waiting for late ranks", [percent(each.waiting_for_ranks) for each in (one, other)], ""),
        ("transfers", [percent(each.kinds["transfer"]) for each in (one, other)], ""),
        ("other work between rounds", [percent(each.kinds["between"]) for each in (one, other)], ""),
    ]
    rows = tuple((name, *values, times) for name, values, times in lines)
    return Table(("", *(report.name for report in reports), ""), rows, spare=frozenset({3}))
