"""The verdict in words: what cost the most, why, and what to do next.

The largest loss of at least `NOTABLE_LOSS` is named. Before it come the ranks for which `causes` has found a cause,
whether others wait for them or not. Without a loss and a cause, nothing is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hvd_hetero.tools.report.attribution import kinds_of
from hvd_hetero.tools.report.causes import KINDS, NOTABLE_LOSS, NOTABLE_UNEXPLAINED_LOSS
from hvd_hetero.tools.report.figures import Figures
from hvd_hetero.tools.report.words import named_ranks, percent
from hvd_hetero.tools.report.worth_words import leave_out_advice

if TYPE_CHECKING:
    from hvd_hetero.tools.report.causes import Cause

# Late is a rank that costs so much of the time, and so many times the mean rank's cost (arbitrary).
_LATE_FROM, _LATE_FROM_TIMES_MEAN = 0.025, 1.5
# With the worst rank those are named that cost at least half as much (arbitrary).
_LATE_TOO_FROM = 0.5
_RANKS_NAMED = 4
# A range whose ends are further apart is given by its lower end alone.
_RANGE_SHOWN_UP_TO = 1.1
# A replay is within some 2 % of the real training (benchmarks/results/report_splits.md).
_GAIN_MENTIONED_FROM = 1.02


@dataclass(frozen=True, slots=True)
class Verdict:
    """Three answers: what, why, and what to do."""

    verdict: str
    why: str
    next: str
    kind: str
    """"nothing" (is wrong), "late" (ranks that others wait for), "slow" (ranks that cost little), or the loss named."""
    causes: tuple[str, ...] = ()
    """The kinds of causes that ``why`` names."""


def _by_kind(
    causes: Sequence[Cause | None], ranks: list[int], subject: list[int]
) -> tuple[tuple[str, ...], list[str], list[str]]:
    """Return the kinds of causes that ``ranks`` have, with evidence and remedy of each kind: those of its first rank.

    Evidence names its rank, unless the verdict has no other subject.
    """
    by_kind: dict[str, tuple[Cause, list[int]]] = {}
    for rank in ranks:
        if (cause := causes[rank]) is not None:
            by_kind.setdefault(cause.kind, (cause, []))[1].append(rank)
    evidence = []
    for kind, (cause, same) in by_kind.items():
        several = f"{_named(same)}: {KINDS[kind]}. " if len(same) > 1 else ""
        evidence.append(several + (cause.evidence if subject == same[:1] else f"Rank {same[0]}: {cause.evidence}"))
    remedies = [(f"{_named(same)}: " if len(by_kind) > 1 else "") + cause.remedy for cause, same in by_kind.values()]
    return tuple(by_kind), evidence, remedies


def verdict(found: Figures, causes: Sequence[Cause | None]) -> Verdict:
    """Return what cost this run the most, why, and what to do."""
    # A slow network is the cause of no single rank.
    network = next((cause for cause in causes if cause is not None and cause.kind == "network"), None)
    own = [None if cause is None or cause.kind == "network" else cause for cause in causes]
    late, scatter = late_ranks(found), []
    slow = _slow_ranks(found, own, take_turns=not late)
    if late and found.ranks.cost[late].sum() < NOTABLE_UNEXPLAINED_LOSS and not set(late) & set(slow):
        # Some rank is always the last one. Without a cause, a small loss may be that alone.
        late, scatter = [], late
    # Waiting for a few late ranks is one loss. If all bear about the same, each kind of waiting is a loss by itself.
    losses = dict(found.kinds)
    if late:
        losses = {"late": found.waiting_for_ranks, "transfer": losses["transfer"], "between": losses["between"]}
    # Equal ranks lose time to these two as well.
    least = {"transfer": NOTABLE_UNEXPLAINED_LOSS, "computing": NOTABLE_UNEXPLAINED_LOSS}
    large = [loss for loss, share in losses.items() if share >= least.get(loss, NOTABLE_LOSS)]
    largest = max(large, key=losses.__getitem__, default="nothing")
    of_all = _of_all_ranks(found, largest) if largest in found.kinds else None
    if network is not None and of_all is not None and largest == "transfer":
        of_all = Verdict(of_all.verdict, network.evidence, network.remedy, "transfer", ("network",))
    # Before the losses of all ranks: if the split makes up for a slow rank, no loss shows it.
    if late and (largest == "late" or slow):
        return _late(found, late, own, of_all)
    if slow:
        return _slow(found, slow, own, of_all)
    return of_all or _nothing(found, scatter)


def late_ranks(found: Figures) -> list[int]:
    """Return the ranks that bear most of the waiting for ranks, the worst first; none if all bear about the same."""
    cost = found.ranks.cost
    worst = float(cost.max())
    if found.workers == 1 or worst < _LATE_FROM or worst < _LATE_FROM_TIMES_MEAN * float(cost.mean()):
        return []
    order = np.argsort(-cost, kind="stable")
    return [int(rank) for rank in order if cost[rank] >= _LATE_TOO_FROM * worst]


def _slow_ranks(found: Figures, causes: Sequence[Cause | None], *, take_turns: bool = False) -> list[int]:
    """Return the ranks with a cause, the slowest first; those with too large a share only if there are no others."""
    pace = found.ranks.of_best_rank
    # If ranks take turns, one that is about as fast as others is not slow for an unknown reason.
    slow = pace <= 1.0 - NOTABLE_UNEXPLAINED_LOSS if take_turns else np.ones(len(pace), dtype=bool)
    kinds = {i: cause.kind for i, cause in enumerate(causes) if cause and (slow[i] or cause.kind != "unknown")}
    ranks = [rank for rank, kind in kinds.items() if kind != "share"] or list(kinds)
    return sorted(ranks, key=lambda rank: float(np.nan_to_num(pace[rank])))


def _largest(found: Figures, of_all: Verdict | None = None) -> str:
    """Return half a sentence on the loss of all ranks, or else on the largest loss."""
    names = kinds_of(found.workers)
    loss = of_all.kind if of_all is not None else max(names, key=found.kinds.__getitem__)
    return f"largest loss is {names[loss]}: {percent(found.kinds[loss])} of the time."


def _nothing(found: Figures, scatter: list[int]) -> Verdict:
    who = "The rank computes" if found.workers == 1 else "The ranks compute"
    cost = float(found.ranks.cost[scatter].sum())
    verdict, why, equal = "Nothing is wrong.", "", ""
    if found.workers > 1:
        # Transfers, turns in being last, and late ranks without a cause: all of these are there in a good run.
        equal = f", or {NOTABLE_UNEXPLAINED_LOSS:.0%} where equal ranks lose time, too"
    if cost >= NOTABLE_LOSS:
        verdict = "No problem was found."
        why = f"{_named(scatter)} held all others up for {percent(cost)} of the time, and no reading explains why. "
    return Verdict(
        f"{verdict} The {_largest(found)}",
        f"{why}{who} for {found.ideal:.0%} of the time. Every run loses some: less than "
        f"{NOTABLE_LOSS:.0%} is normal{equal}.",
        "Nothing to do.",
        "nothing",
    )


def _slow(found: Figures, slow: list[int], causes: Sequence[Cause | None], of_all: Verdict | None) -> Verdict:
    (kinds, evidence, remedies), cost = _by_kind(causes, slow, slow), float(found.ranks.cost[slow].sum())
    alone = len(slow) == 1
    be, have, who = ("is", "has", "It") if alone else ("are", "have", "They")
    what = {"share": f"{have} too many samples", "rests": f"{have} no samples"}.get("".join(kinds), f"{be} slow")
    besides = of_all if of_all is not None and of_all.kind not in kinds else None
    # A slow rank's cause explains neither of these two losses.
    hidden = max(found.kinds, key=found.kinds.__getitem__) in ("transfer", "between")
    also = f", and the {_largest(found, besides)}" if besides or hidden else "."
    text = f"{_named(slow)} {what}. {who} held all others up for {percent(cost)} of the time{also}"
    remedies_of_all = dict.fromkeys([*remedies, *_gain(found), *([besides.next] if besides else [])])
    return Verdict(text, " ".join(evidence), " ".join(remedies_of_all), "slow", kinds)


def _late(found: Figures, late: list[int], causes: Sequence[Cause | None], of_all: Verdict | None) -> Verdict:
    cost = float(found.ranks.cost[late].sum())
    kinds, evidence, remedies = _by_kind(causes, late, late)
    if not kinds:
        kinds, evidence, remedies = _by_kind(causes, _slow_ranks(found, causes), late)
        share, speed = float(found.ranks.cost_input[late].sum()) / cost, found.ranks.of_best_rank[late[0]]
        pace = f"works at {speed:.0%} of the fastest rank's speed" if np.isfinite(speed) else "shows no speed"
        known = f"{share:.0%} of this was waiting for data." if share >= 0.5 else f"Rank {late[0]} {pace}."
        evidence = [f"The cause is not known. {known}", *evidence]
    others = found.waiting_for_ranks - cost
    also = f", and the other ranks together for {others:.0%}" if others >= NOTABLE_LOSS else ""
    besides = f" The {_largest(found, of_all)}" if of_all else ""
    text = f"{_named(late)} held all others up for {percent(cost)} of the time{also}.{besides}"
    remedies_of_all = dict.fromkeys([*remedies, *_gain(found), *([of_all.next] if of_all else [])])
    remedy = " ".join(remedies_of_all) or "Look at its machine with top while it trains."
    return Verdict(text, " ".join(evidence), remedy, "late", kinds)


def _gain(found: Figures) -> list[str]:
    """Return sentences on how much faster LB-BSP, and fewer ranks, would be by the replay; none for a small gain."""
    if found.alternatives is None:
        return []
    without = leave_out_advice(found.alternatives.worth) if found.alternatives.worth is not None else ""
    fewer = [without] if without else []
    if found.policy == "lb-bsp":
        return fewer
    balanced, rate = found.alternatives.of("lb-bsp"), found.alternatives.samples_per_s
    if balanced is None or balanced.least < _GAIN_MENTIONED_FROM * rate:
        # Leaving a rank out is a gain under lb-bsp alone, so under this policy the table mentions it, and no advice.
        return []
    least, most = f"{balanced.least / rate:.2f}", f"{balanced.most / rate:.2f}"
    if balanced.most > _RANGE_SHOWN_UP_TO * balanced.least:
        how = f"at least {least} times"
    else:
        how = f"about {least} times" if least == most else f"about {least} to {most} times"
    return [f'policy="lb-bsp" would be {how} as fast on these machines.', *fewer]


def _of_all_ranks(found: Figures, loss: str) -> Verdict:
    """Return the verdict on a loss that is no single rank's."""
    share, alone = f"{found.kinds[loss]:.0%}", found.workers == 1
    if loss == "input":
        return _input(found)
    if loss == "computing":
        what = f"The ranks took turns in being the slowest, which cost {share} of the time."
        why = (
            "No rank is late much more often than the others. The time of each rank scatters from round to round, and "
            "a round ends with the slowest."
        )
        longer = 'Make rounds longer (a larger global_batch), or try policy="lb-non-blocking".'
        remedy = " ".join(_gain(found)) or longer
    elif loss == "loop":
        what = f"Ranks that did other work between rounds held the others up for {share} of the time."
        why = "They evaluate, save or log at different moments, and a round begins with the last of them."
        remedy = "Do this work less often, on another thread, or on all ranks in the same round."
    elif loss == "transfer":
        each_ms = 1e3 * found.kinds["transfer"] * found.elapsed_s / found.rounds
        what = f"{'Synchronising' if alone else 'Transfers between ranks'} took {share} of the time."
        why = f"{'The rank' if alone else 'Even the slowest rank'} waited {each_ms:.3g} ms in a round. "
        why += _twice_the_batch(found)
        remedy = "Make rounds longer (a larger global_batch), compress gradients, or use a faster network."
    else:
        what = f"Work between rounds took {share} of the time."
        why = (
            "In this time no rank computes, waits or reads data. It is what the training loop does besides, such as "
            "evaluation, checkpoints or logging."
        )
        remedy = "Do this work less often, or on another thread."
    return Verdict(what, why, remedy, loss)


def _twice_the_batch(found: Figures) -> str:
    """Return a sentence on how much faster twice the global batch would be, and what progress it would make."""
    # A transfer does not depend on the batch, and all else takes twice as long.
    faster = 2.0 / (2.0 - found.kinds["transfer"])
    text = f"Twice the global batch would do {faster:.2f} times as many samples per second"
    if math.isfinite(found.noise_scale):
        batch = found.samples / found.rounds
        worth = faster * (found.noise_scale + batch) / (found.noise_scale + 2.0 * batch)
        text += f", and {worth:.2f} times the progress, given the noise of the gradients"
    return f"{text}."


def _input(found: Figures) -> Verdict:
    share = found.ranks.input
    worst = [int(rank) for rank in np.argsort(-share, kind="stable") if share[rank] >= _LATE_TOO_FROM * share.max()]
    others = np.delete(share, worst)
    least, most = f"{share[worst].min():.0%}", f"{share.max():.0%}"
    who, whose, why = _named(worst), "its" if len(worst) == 1 else "their", "Computing is faster than reading data."
    if others.size:
        why = f"The other ranks waited for their data for {percent(float(others.max()))} of the time at most."
    else:
        who = "The rank" if found.workers == 1 else "All ranks"
    what = f"{who} waited for {whose} own data for {most if least == most else f'{least} to {most}'} of the time."
    remedy = "Give the data loaders more workers or a faster disk, or preprocess the data before training."
    return Verdict(what, why, remedy, "input")


def _named(ranks: list[int]) -> str:
    return named_ranks(ranks, _RANKS_NAMED).capitalize()


def comparison(names: Sequence[str], found: Sequence[Figures]) -> str:
    """Return sentences on which of two runs is faster, by how much, and what both lost to late ranks."""
    one, other = found
    first, second = names
    times = other.samples_per_s / one.samples_per_s
    if abs(times - 1.0) < 0.01:
        text = f"{first} and {second} were equally fast, within 1%."
    elif times > 1:
        text = f"{second} did {times:.2f} times as many samples per second as {first}."
    else:
        text = f"{first} did {1 / times:.2f} times as many samples per second as {second}."
    saved = one.waiting_for_ranks - other.waiting_for_ranks
    text += f" Waiting for late ranks took {one.waiting_for_ranks:.1%} and {other.waiting_for_ranks:.1%} of the time"
    text += "." if abs(saved) >= 0.005 else ", about the same."
    if (one.workers, one.global_batch) != (other.workers, other.global_batch):
        text += " They differ in world size or global batch, so this compares more than the policy."
    return text
