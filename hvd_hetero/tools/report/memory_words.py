"""What memory a run's micro-batches took, and where it decided the split: for reports."""

from __future__ import annotations

import numpy as np

from hvd_hetero.policies.policy_names import policy_class
from hvd_hetero.telemetry.changes import LISTED_RANKS
from hvd_hetero.telemetry.run import Run
from hvd_hetero.tools.report.words import listed


def memory_note(run: Run) -> str:
    """Return a sentence with each rank's memory line, peak and bound; "": none is known."""
    columns = run.memory_base_mib, run.memory_slope_mib, run.memory_peak_mib, run.limit
    ranks_by_words: dict[str, list[int]] = {}
    for rank, (base, slope, peak, limit) in enumerate(zip(*(column[-1] for column in columns), strict=True)):
        words = [f"{base:,.0f} + {slope:.3g} x MiB, {peak:,.0f} MiB at the peak"] if slope else []
        words += [f"at most {limit:,.0f} samples"] if limit else []
        if words:
            ranks_by_words.setdefault(", ".join(words), []).append(rank)
    each = "; ".join(
        f"rank {listed(ranks, LISTED_RANKS)}: {words}" for words, ranks in [*ranks_by_words.items()][:LISTED_RANKS]
    )
    return f"Memory of a micro-batch of x samples, {each}." if each else ""


def decided_by_memory(run: Run) -> str:
    """Return a sentence on ranks whose memory holds less than their speed would take; "" if there is none."""
    # The last tenth of the rounds, in which bounds are known (arbitrary).
    recent = slice(-max(len(run.round) // 10, 1), None)
    with np.errstate(invalid="ignore"):
        samples, speeds = (np.median(of[recent], axis=0) for of in (run.plan, run.samples_per_s))
    holds = run.limit[-1] * np.maximum(run.micro_batches[-1], 1)
    if not policy_class(run.policy).measures or not np.isfinite(speeds).all() or not speeds.sum() > 0.0:
        return ""
    could = samples.sum() * speeds / speeds.sum()
    # With less than 5 % more samples, memory decides nothing that matters (arbitrary).
    at_bound = (run.limit[-1] > 0) & (samples >= holds - run.micro_batches[-1]) & (could > 1.05 * samples)
    words = [
        f"rank {rank} could take {could[rank]:,.0f} samples by speed, and holds {samples[rank]:,.0f}"
        for rank in np.flatnonzero(at_bound).tolist()[:LISTED_RANKS]
    ]
    return f"Memory, not speed, decides the split: {'; '.join(words)}." if words else ""
