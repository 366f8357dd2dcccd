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
from hvd_hetero.tools.simulation.recorded_machines import in_mean_samples
from hvd_hetero.tools.simulation.worth import Worth, prices_of

# Causes of so many figures take seconds, so of a larger run every k-th round is looked at.
_FIGURES_LOOKED_AT = 500_000
_RANKS_NAMED = 8
# Of what a sample costs: each, by its length, squared, and by the longest of its batch, M, to which it is padded.
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
            raise ValueError(f"a comparison needs files of two runs, and {both} are one file; name it once")
    found = []
    for run, path, name in zip(read, paths, _names(paths), strict=True):
        try:
            each = () if prices is None else prices_of(prices, run.workers)
            found.append(replace(report_of(run, name, replayed=replayed), prices=each))
            if prices is not None and found[-1].worth is None:
                raise ValueError(f"--prices needs a run that can be replayed, but {found[-1].figures.no_alternatives}")
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
    """Return the report of a run, under this name; ``replayed``: with the speeds of other splits."""
    recorded, run = run, in_mean_samples(run)
    found = figures(run, replayed=replayed)
    # A fit to noisy times may be below zero, which no cost is.
    run = run.replace(fixed_samples=np.maximum(run.fixed_samples, 0.0))
    every = max(-(-run.samples.size // _FIGURES_LOOKED_AT), 1)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # of figures that cannot be true
        why = causes(run.take(slice(None, None, every)), found.fractions)
    notes = [f"Causes were looked for in every {every}th round, because the run is large."] if every > 1 else []
    notes += _missing(run, found, {**impossible(run), "work": np.nan_to_num(recorded.work) != run.work})
    judged = verdict(found, why)
    judged = replace(judged, why=" ".join(filter(None, (judged.why, decided_by_memory(run)))))
    return Report(name, found, why, judged, notes, " ".join(filter(None, (_cost_note(run), memory_note(run)))))


def _missing(run: Run, found: Figures, wrong_figures: dict[str, Bools]) -> list[str]:
    notes = []
    if run.cut_short:
        notes.append("The last line of the file is incomplete, as after a killed run. It is left out.")
    if run.left_out:
        notes.append(f"{run.left_out}. Figures cover the recorded rounds.")
    strange = int((~((run.elapsed_s > 0) & (run.elapsed_s <= LONGEST_ROUND_S))).sum())
    if strange:
        notes.append(f"{strange} of {len(run.elapsed_s)} rounds are left out: their duration is zero or impossible.")
    for column, wrong in wrong_figures.items():
        if wrong.any():
            ranks = named_ranks([int(rank) for rank in np.flatnonzero(wrong.any(axis=0))], _RANKS_NAMED)
            by = "their samples" if column == "work" else "the duration of the round"
            notes.append(
                f"{column} is impossible in {int(wrong.any(axis=1).sum())} of {len(wrong)} rounds ({ranks}), compared "
                f"with {by}. It is ignored there."
            )
    if silent := [rank for rank in range(run.workers) if not found.ranks.samples_per_s[rank] > 0]:
        notes.append(
            f"The speed of {named_ranks(silent, _RANKS_NAMED)} is not known. The ideal leaves "
            f"{'it' if len(silent) == 1 else 'them'} out."
        )
    if found.rounds < 10:
        notes.append(
            f"All figures are uncertain, because the run has {found.rounds} round{'s' if found.rounds > 1 else ''}."
        )
    return notes


def _cost_note(run: Run) -> str:
    """Return sentences on what a sample costs, how much is padding, and what division by cost saves; "": not known."""
    columns = [getattr(run, f"cost_{name}") for name in CostRule._fields]
    measured = (sum(columns) > 0.0) & (run.work > 0.0)
    if not measured.any():
        return ""
    rounds = measured.any(axis=1)
    costs = [float(np.median(column[measured])) for column in columns]
    fit = " + ".join(f"{cost:.2g}{unit}" for unit, cost in zip(_UNITS, costs, strict=True) if cost)
    padding = float((run.padding * run.work)[rounds].sum() / run.work[rounds].sum())
    by_number = float(np.median(run.by_number[rounds].max(axis=1)))
    longest = " (M: the longest of its batch)" if "M" in fit else ""
    return (
        f"A sample of length L costs {fit} of a mean sample{longest}. {percent(padding)} of the work is padding. "
        f"If samples were divided by count, the slowest rank would take {by_number:.2f} times as long."
    )
