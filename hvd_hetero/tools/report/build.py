"""A report of one file: read, analysed, judged. Terminal and page show the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np

from hvd_hetero.rounds import CostRule
from hvd_hetero.telemetry.files import named
from hvd_hetero.telemetry.run import Run, read_run
from hvd_hetero.tools.report.causes import Cause, causes
from hvd_hetero.tools.report.figures import Figures, figures
from hvd_hetero.tools.report.memory_words import decided_by_memory, memory_note
from hvd_hetero.tools.report.verdict import Verdict, verdict
from hvd_hetero.tools.report.words import named_ranks, percent
from hvd_hetero.tools.report.work import LONGEST_ROUND_S, Bools, impossible
from hvd_hetero.tools.simulation.replay import in_mean_samples
from hvd_hetero.tools.simulation.worth import Worth, prices_of

_MOST_FIGURES = 500_000
_MOST_NAMED = 8  # ranks
_UNITS = "", " L", " L²", " M", " M²"


@dataclass(frozen=True, slots=True)
class Report:
    """The content shown for one run."""

    name: str
    figures: Figures
    causes: Sequence[Cause | None]
    """The cause of each rank's slowness; None: it was not slow."""
    verdict: Verdict
    notes: Sequence[str]
    """What is missing from the run."""
    costs: str = ""
    """What samples cost, and what memory they take; "": all the same, or not known."""
    prices: Sequence[float] = ()
    """What each rank costs per hour; empty: not known."""

    @property
    def worth(self) -> Worth | None:
        """What each rank is worth; None if the run was not replayed."""
        return None if self.figures.alternatives is None else self.figures.alternatives.worth


def make_reports(paths: Sequence[Path], *, replayed: bool = True, prices: str | None = None) -> list[Report]:
    """Read files of different runs and report on each; ``prices`` as `prices_of` reads them."""
    read = [read_run(path) for path in paths]
    files = [path.resolve() for path in paths]
    for i, j in combinations(range(len(paths)), 2):
        if files[i] == files[j]:
            both = f"{named(paths[i])} and {named(paths[j])}"
            raise ValueError(f"{both} must be of two runs, and are one file; name it once")
    found = []
    for run, path, name in zip(read, paths, _names(paths), strict=True):
        try:
            each = () if prices is None else prices_of(prices, run.workers)
            found.append(replace(report_of(run, name, replayed=replayed), prices=each))
            if prices is not None and found[-1].worth is None:
                raise ValueError(f"--prices needs a run that can be replayed, and {found[-1].figures.no_alternatives}")
        except ValueError as error:
            raise ValueError(f"{named(path)}: {error}") from None
    return found


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the ends of paths that differ: the name of the file, with as many folders as it takes."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = [named(Path(*path.parts[-count:])) for path in paths]
        if len(set(names)) == len(paths):
            return names
    return [named(path.resolve()) for path in paths]


def report_of(run: Run, name: str, *, replayed: bool = True) -> Report:
    """Report on a run."""
    recorded, run = run, in_mean_samples(run)
    found = figures(run, replayed=replayed)
    run = run.replace(fixed_samples=np.maximum(run.fixed_samples, 0.0))  # less cannot be true
    # Causes take seconds for half a million figures, so of a larger run every k-th round is looked at.
    every = max(-(-run.samples.size // _MOST_FIGURES), 1)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # of figures that cannot be true
        why = causes(run.take(slice(None, None, every)), found.shares)
    notes = [f"In a run as large as this, causes are looked for in 1 round of {every}."] if every > 1 else []
    notes += _missing(run, found, {**impossible(run), "work": np.nan_to_num(recorded.work) != run.work})
    judged = verdict(found, why)
    judged = replace(judged, why=" ".join(filter(None, (judged.why, decided_by_memory(run)))))
    return Report(name, found, why, judged, notes, " ".join(filter(None, (_cost_note(run), memory_note(run)))))


def _missing(run: Run, found: Figures, wrong_figures: dict[str, Bools]) -> list[str]:
    notes = []
    if run.cut_short:
        notes.append("The last line of the file is cut short, as a killed run leaves it, and is left out.")
    if run.left_out:
        notes.append(f"{run.left_out}. Figures are those of the recorded rounds.")
    strange = int((~((run.elapsed_s > 0) & (run.elapsed_s <= LONGEST_ROUND_S))).sum())
    if strange:
        notes.append(f"Rounds that take no time, or one that cannot be true, are left out: {strange}.")
    for column, wrong in wrong_figures.items():
        if wrong.any():
            ranks = named_ranks([int(rank) for rank in np.flatnonzero(wrong.any(axis=0))], _MOST_NAMED)
            by = "their samples" if column == "work" else "the time that the rounds took"
            notes.append(
                f"{column} cannot be true in {int(wrong.any(axis=1).sum())} of {len(wrong)} rounds ({ranks}), by {by}, "
                "and counts as not known there."
            )
    if silent := [rank for rank in range(run.workers) if not found.ranks.samples_per_s[rank] > 0]:
        notes.append(
            f"No speed is known of {named_ranks(silent, _MOST_NAMED)}: the ideal leaves "
            f"{'it' if len(silent) == 1 else 'them'} out."
        )
    if found.rounds < 10:
        notes.append(f"All figures are uncertain: they rest on {found.rounds} round{'s' if found.rounds > 1 else ''}.")
    return notes


def _cost_note(run: Run) -> str:
    """Return what a sample costs, what filling batches up costs, and what division by cost has saved; "": not known."""
    columns = [getattr(run, f"cost_{name}") for name in CostRule._fields]
    measured = (sum(columns) > 0.0) & (run.work > 0.0)
    if not measured.any():
        return ""
    rounds = measured.any(axis=1)
    costs = [float(np.median(column[measured])) for column in columns]
    fit = " + ".join(f"{cost:.2g}{unit}" for unit, cost in zip(_UNITS, costs, strict=True) if cost)
    padding = float((run.padding * run.work)[rounds].sum() / run.work[rounds].sum())
    by_number = float(np.median(run.by_number[rounds].max(axis=1)))
    longest = ", M being the longest of its batch" if "M" in fit else ""
    return (
        f"A sample of length L costs {fit} of a mean one, as measured{longest}; {percent(padding)} of the work is "
        f"filling up batches. Divided by number, the latest rank would have taken {by_number:.2f} times as long."
    )
