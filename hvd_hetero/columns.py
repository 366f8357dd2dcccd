"""The columns of the table that all ranks share, declared once.

A column is one figure that each rank reports of a round. The row that travels (``rounds.RoundReport``), the lines of
telemetry, the arrays of a recorded run, and the tables of ``docs/telemetry.md`` are made from this list. A row of
several rounds holds their means.

Seconds are of a monotonic clock; NaN stands for "not known". Columns that a rank does not give are 0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Written = Literal["always", "sometimes", "never"]


class Column(NamedTuple):
    """One figure of each rank. ``written``: into telemetry; "sometimes" if some rank has it in that round."""

    unit: str
    meaning: str
    written: Written = "never"
    whole: bool = False


_PADDED = "its cost per length of the longest sample in the batch"

COLUMNS: dict[str, Column] = {
    "samples": Column("samples", "what each rank did", "always", whole=True),
    "micro_batches": Column(
        "",
        "number of micro-batches; beside another reducer those of the plan, which the loader may cut further",
        "always",
        whole=True,
    ),
    "compute_s": Column("s", "forward, backward, and the previous round's update; no waiting", "always"),
    "input_s": Column("s", "waiting for the rank's own data", "always"),
    # A round's waiting is known only after its row has left, so it travels in the row of the next round.
    "wait_s": Column(
        "s",
        "waiting for others, and the transfer ([below](#waiting-and-computing)); `null` for the last round of a run",
        "always",
    ),
    "samples_per_s": Column(
        "1/s",
        "the rank's forecast of its own speed ([below](#expected-speed)); `null` before it has measured one",
        "always",
    ),
    "cpu": Column("fraction", "the rank's CPU driver: the part of its CPU that is available to it", "always"),
    "memory": Column("fraction", "the rank's memory driver: the part of memory that is available to it", "always"),
    # What must be the same on all ranks, or in some of them (`consistency`).
    "fingerprint": Column("", "a checksum of the plan, and of the place in the data, that the rank believes in"),
    "settings": Column("", "one number made of the optimizer's hyper-parameters"),
    "parameter_norm": Column(
        "", "the size of a piece of the parameters, in this round or the one before; 0: not known"
    ),
    "bits": Column("", "a checksum of that piece's bits, which processors that round alike have in common"),
    "kernels": Column("", "a checksum of the processor and its threads"),
    "broken": Column("", "1: this rank's gradient of the round holds NaN or an infinity"),
    "contents": Column("", "one number for the samples that the round was cut from; 0: not compared"),
    "once_s": Column(
        "s",
        "the part of `compute_s` and `input_s` that comes once a round: the update before it (beside another reducer: "
        "in it), and the wait for its first micro-batch; 0: not known (on CUDA devices)",
        "sometimes",
    ),
    "fixed_samples": Column(
        "samples",
        "LB-BSP: the fixed cost of a micro-batch, in samples that would take as long, learned from the table of all "
        "ranks; 0: not known yet",
        "sometimes",
    ),
    "limit": Column(
        "samples",
        "the largest micro-batch that the rank may do, by your settings and by what its memory allows, with headroom "
        "([memory](memory.md)); 0: any size",
        "sometimes",
        whole=True,
    ),
    "memory_base_mib": Column(
        "MiB", "p0 of the memory line p0 + s x, the peak of a micro-batch of x samples; 0: not known", "sometimes"
    ),
    "memory_slope_mib": Column("MiB", "s of the memory line, for each sample; 0: not known", "sometimes"),
    "memory_peak_mib": Column("MiB", "the peak of the largest micro-batch measured; 0: not known", "sometimes"),
    "slope_s": Column(
        "s", '`LBBSP(device="gpu")`: seconds per sample beyond saturation; 0: not known yet', "sometimes"
    ),
    "intercept_s": Column("s", '`LBBSP(device="gpu")`: fixed seconds of a micro-batch; 0: not known yet', "sometimes"),
    "saturation": Column(
        "samples",
        '`LBBSP(device="gpu")`: a micro-batch smaller than this saves no time; 0: not known yet',
        "sometimes",
    ),
    # What `compute_s` and `input_s` were measured on, which may belong to the round before; 0 if these say nothing
    # about the speed (a short round, or the very first). Samples of unequal cost count as `work` does.
    "timed_samples": Column("samples", "the samples that the times were measured on; 0: they teach no speed"),
    # Then `compute_s`, `input_s` and `timed_samples` belong to the round before, too. 0: the rank's clock gives the
    # times of this round.
    "lap_s": Column("s", "what the round before took on this rank's device, whose work is queued"),
    "ended": Column("", "1: the rank reads a part of the data alone, and that part ends with this round"),
    # From here on, of about the last second (`measurement.hindrances`); NaN in the first.
    "throttled": Column(
        "fraction",
        "of the last second or so ([below](#cpu-limits-contention-stolen-time)) in which a quota held the rank back",
        "sometimes",
    ),
    "quota_cores": Column("cores", "what the strictest quota allows; 0: there is none", "sometimes"),
    "contended": Column("fraction", "of that second in which the rank was ready, and other processes ran", "sometimes"),
    "stolen": Column("fraction", "of the busy time of the rank's cores that the hypervisor took", "sometimes"),
    "stalled": Column(
        "fraction", "of that second in which the rank, or its control group, waited for memory", "sometimes"
    ),
    "faults_per_s": Column("1/s", "pages that the rank had to read back from disk", "sometimes"),
    "collecting": Column("fraction", "of that second in which Python collected garbage", "sometimes"),
    "clock": Column(
        "fraction",
        "frequency of the rank's core over the highest that this core can have; 0: not known",
        "sometimes",
    ),
    "sent_mb_s": Column(
        "MB/s",
        "what the rank's host, or its container, sent to others, over all interfaces but the loopback; 0: not known, "
        "or nothing",
        "sometimes",
    ),
    "weight": Column("", "what this rank's mean gradient counts in the round's: its samples, or what `weight_of` says"),
    "work": Column(
        "", "with `cost_of`: the samples of the round, each counted by its cost in mean samples", "sometimes"
    ),
    # The coefficients of `SampleFigures`; 0 in all five: not known.
    "cost_number": Column(
        "",
        "with `cost_of`: what each sample costs apart from its length, as the rank has measured it, in mean samples",
        "sometimes",
    ),
    "cost_length": Column("", "its cost per unit of length", "sometimes"),
    "cost_square": Column("", "its cost per squared length", "sometimes"),
    "cost_padded": Column("", f"{_PADDED}: padding", "sometimes"),
    "cost_padded_square": Column("", f"{_PADDED}, squared: padding", "sometimes"),
    "padding": Column("fraction", "of the rank's work that was padding batches to their longest sample", "sometimes"),
    "by_number": Column(
        "",
        "forecast round time when samples are divided by count, over that when divided by cost. Above 1, `cost_of` "
        "helps. The same on all ranks",
        "sometimes",
    ),
    # Of an earlier round, whose gradients were measured.
    "gradient_samples": Column("samples", "the rank's samples in it; 0: none was measured since the last table"),
    "gradient_square": Column("", "the squared norm of its mean gradient; of several, the mean by samples"),
    "further_batches": Column("", "its batches beyond one: micro-batches, where each is measured by itself"),
    "mean_square": Column("", "the squared norm of the mean gradient over all ranks"),
}


def written(when: Written) -> dict[str, Column]:
    """Return the columns that are written into telemetry at these times."""
    return {name: column for name, column in COLUMNS.items() if column.written == when}
