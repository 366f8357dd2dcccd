r"""Rounds in which something changed: ranks, the split, a rank's speed, a memory limit, a known fixed cost.

**A split** changes if the shares of a whole round differ from the whole round before. Changes within a few
rounds of each other count as one, because a balancer that learns moves in steps. Short last rounds of epochs are not
whole. If the number of samples differs in most rounds anyway, as in supersteps, splits are left out.

**A speed** changes if the median of the log speed over a block of w rounds moves by more than a fifth, and by more
than four times the median difference between neighbouring blocks of that rank:

    |M_{b+1} - M_{b-1}| > max(log 1.2, 4 · median_b |M_{b+1} - M_b|)

The round is then the one that parts the three blocks into the two most even halves. w grows with the length of the run,
so a change that lasts for less than w / 2 rounds is left out: the pictures show it.

w, a fifth, four and the most that are listed are arbitrary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_hetero.telemetry.run import Run
from hvd_hetero.tools.report.speeds import median_of_rounds
from hvd_hetero.tools.report.words import named_ranks

__all__ = ["MOST_TOLD", "Change", "changes"]

Floats = npt.NDArray[np.float64]

MOST_TOLD = 40
_NEAR = 5  # rounds between two changes of the split that count as one
_LEAST = math.log(1.2)
_TIMES_USUAL = 4.0
_BLOCKS, _SHORTEST = 48, 6
_RANKS_NAMED = 8


@dataclass(frozen=True, slots=True)
class Change:
    """Something that changed."""

    round: int
    kind: str
    """"ranks", "split", "speed", "memory" or "fixed cost"."""
    text: str


def changes(run: Run, speed: Floats) -> tuple[list[Change], int]:
    """Return what changed, in order of time, and how many smaller changes are left out."""
    found = [*_ranks_changed(run), *_splits(run), *_speeds(run, speed), *_limits(run), *_fixed_costs(run)]
    kept = sorted(found, key=lambda each: -each[0])[:MOST_TOLD]
    return sorted((change for _, change in kept), key=lambda change: change.round), len(found) - len(kept)


def _ranks_changed(run: Run) -> list[tuple[float, Change]]:
    found = []
    for recovery in run.recoveries:
        new = np.flatnonzero(recovery.joined).tolist()
        known = recovery.total_s[~recovery.joined & np.isfinite(recovery.total_s)]
        took = f"; the first round was over {known.max():.1f} s after a change was noticed" if len(known) else ""
        who = f", {named_ranks(new, _RANKS_NAMED)} of them new" if 0 < len(new) < run.workers else ""
        ranks = f"{run.workers} ranks go" if run.workers > 1 else "1 rank goes"
        found.append((3.0, Change(recovery.round, "ranks", f"the ranks met again: {ranks} on{who}{took}")))
    return found


def _splits(run: Run) -> list[tuple[float, Change]]:
    totals = run.plan.sum(axis=1)
    if not len(totals):
        return []
    values, counts = np.unique(totals, return_counts=True)
    whole = np.flatnonzero(totals == values[counts.argmax()])
    if 2 * len(whole) < len(totals):
        return []
    plans = run.plan[whole]
    moved = np.flatnonzero((plans[1:] != plans[:-1]).any(axis=1)) + 1
    if not len(moved):
        return []
    groups = np.split(moved, np.flatnonzero(np.diff(whole[moved]) > _NEAR) + 1)
    total = float(plans[0].sum())
    found = []
    for group in groups:
        before, after = plans[group[0] - 1], plans[group[-1]]
        first, last = int(run.round[whole[group[0]]]), int(run.round[whole[group[-1]]])
        size = float(np.abs(after - before).sum()) / 2 / total
        steps = "" if len(group) == 1 else f", in {len(group)} steps until round {last}"
        found.append((1.0 + size, Change(first, "split", f"batches {_from_to(before, after)}{steps}")))
    return found


def _from_to(before: npt.NDArray[np.int64], after: npt.NDArray[np.int64]) -> str:
    if len(before) <= _RANKS_NAMED:
        return f"{' : '.join(map(str, before))} → {' : '.join(map(str, after))}"
    change = after - before
    most = int(np.abs(change).argmax())
    return f"of {int((change != 0).sum())} ranks; the most on rank {most}: {before[most]} → {after[most]}"


def _speeds(run: Run, speed: Floats) -> list[tuple[float, Change]]:
    rounds = len(speed)
    width = max(_SHORTEST, -(-rounds // _BLOCKS))
    count = rounds // width
    if count < 3:
        return []
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(speed[: count * width])
    blocks = np.stack([median_of_rounds(part) for part in np.split(logs, count)])  # (B, n)
    step = np.full_like(blocks, np.nan)
    step[1:-1] = blocks[2:] - blocks[:-2]
    usual = np.nan_to_num(median_of_rounds(np.abs(np.diff(blocks, axis=0))))
    size = np.nan_to_num(np.abs(step))
    padded = np.pad(size, ((1, 1), (0, 0)))
    peak = (size >= padded[:-2]) & (size > padded[2:]) & (size > np.maximum(_LEAST, _TIMES_USUAL * usual))
    alike: dict[tuple[int, bool], list[int]] = {}
    for block, rank in zip(*(each.tolist() for each in np.nonzero(peak)), strict=True):
        alike.setdefault((block, bool(step[block, rank] < 0)), []).append(rank)
    found = []
    for (block, slower), ranks in alike.items():
        factor = math.exp(float(np.median(size[block, ranks])))
        main = max(ranks, key=lambda rank: size[block, rank])
        at = (block - 1) * width + _parting(logs[(block - 1) * width : (block + 2) * width, main])
        text = f"{named_ranks(ranks, _RANKS_NAMED)} became {factor:.1f} times {'slower' if slower else 'faster'}"
        found.append((math.log(factor) * len(ranks) + 1.0, Change(int(run.round[at]), "speed", text)))
    return found


def _parting(values: Floats) -> int:
    """Return where to part values, so that the two sides are most even (least squares)."""
    values = np.where(np.isfinite(values), values, np.nanmean(values))
    left, right = np.cumsum(values)[:-1], values.sum() - np.cumsum(values)[:-1]
    count = np.arange(1, len(values))
    return int(np.argmax(left**2 / count + right**2 / (len(values) - count))) + 1


def _limits(run: Run) -> list[tuple[float, Change]]:
    before = np.vstack([np.zeros((1, run.workers), np.int64), run.limit])[:-1]
    found = []
    for k, rank in zip(*(each.tolist() for each in np.nonzero((run.limit != before) & (run.limit > 0))), strict=True):
        text = f"rank {rank} ran out of memory; its micro-batches have {run.limit[k, rank]} samples at most from now on"
        found.append((2.0, Change(int(run.round[k]), "memory", text)))
    return found


def _fixed_costs(run: Run) -> list[tuple[float, Change]]:
    known = run.fixed_samples > 0
    if not known.any():
        return []
    k = int(known.any(axis=1).argmax())
    rank = int(known[k].argmax())
    text = f"the fixed cost of a micro-batch became known: {run.fixed_samples[k, rank]:.3g} samples on rank {rank}"
    return [(1.0, Change(int(run.round[k]), "fixed cost", text))]
