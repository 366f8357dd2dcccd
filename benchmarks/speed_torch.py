"""Gain of every scheme on real ranks of unequal speed: samples per second, as ratios of one run.

    python benchmarks/speed_torch.py [--write] [--only NAME ...] [--variant NAME]

Each scheme trains its own copy of the demo's convolutional network, in alternating turns of a few rounds of one job:
stock Horovod (``hvd.DistributedOptimizer`` and the stock sampler), the oracle, and the schemes of this project. The
oracle is stock Horovod with a split set by hand: tuned beforehand, in real training, until all ranks work equally long,
and adjusted between its turns by what these show. Each turn gives one ratio to the oracle's turn of the same cycle; the
table has their median, its standard error and their quartiles. No absolute time is a result. *Alone* is the first rank
by itself, at full speed: one process that does the whole batch, while the others wait.

A round is one update of 384 samples, with two exceptions. In a non-blocking round slow ranks do only a part, so each
rank may do as many samples as the fastest has in the oracle's split; these rounds then hold about as many as the
others. A superstep of ElasticBSP holds as many iterations of 96 samples as it takes all ranks to end together. The
table has the samples of an update, and each rank's part of them (means over all turns).

Self-adaptive allocation is compared with LB-BSP turn by turn, by the median of the ratios of the same cycle, because
both meet the same moments of the machine there. It counts after five epochs, which are trained in turns, too. From 9 :
1 it must be stable within five epochs and stay so to the end of ten: a declaration that is taken back does not count.

If the slow rank changes every 60 rounds, each scheme meets the change in the first round of its turn. The oracle then
uses the split that it learned in earlier turns with the same slow rank.

The first rank has a core to itself, and the others share one. Processor quotas slow them down if they fit into that
core together, as 1/2 and 1/3 do. If quotas cannot be set, a sleep in proportion to computing does; then ranks also wait
for their core, by chance, and their speeds scatter twice as much.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

from _report import error_of_median, write_result
from rich.progress import Progress

RANK = Path(__file__).with_name("_speed_rank.py")


@dataclass(frozen=True)
class Scenario:
    """Parameters of one launch."""

    kind: str
    factors: tuple[float, ...]
    """Factor by which each rank is slower."""
    cycles: int
    """Turns of each scheme, or epochs."""


SCENARIOS = {
    "half": Scenario("steady", (1, 2), 30),
    "third": Scenario("steady", (1, 3), 30),
    "three": Scenario("steady", (1, 2, 3), 40),
    "switching": Scenario("switching", (1, 2), 8),
    "stability": Scenario("stability", (1, 2), 10),
}
TITLES = {
    "half": "One of two ranks at half speed: samples per second",
    "third": "One of two ranks at a third: samples per second",
    "three": "Three ranks at 1 : 1/2 : 1/3: samples per second",
    "switching": "One of two ranks at half speed, another one every 60 rounds: samples per second",
    "stability": "Self-adaptive allocation from 9 : 1 on ranks of 1 : 1/2",
}
AHEAD = 1.03  # of the oracle: more than such a scheme can gain, except by the machine's unsteadiness
WRONG = 0.02  # longer than at a perfect split: with such an oracle, being near it means little
GIVEN = ("stock", "oracle", "alone")
OF_LB_BSP = {"self-adaptive": 0.97, "variant": 0.99}
AT_LEAST = {"lb-bsp": 0.95, "non-blocking": 0.88, "elastic-bsp": 0.88}


def ratios(turns: dict, name: str, to: str) -> tuple[float, float, float, float]:
    """Return the median of the ratios of turns of the same cycle, its standard error, and quartiles."""
    of = [a / b for a, b in zip(turns[name]["rates"], turns[to]["rates"], strict=True)]
    low, _, high = statistics.quantiles(of, n=4)
    return statistics.median(of), error_of_median(of, len(of)), low, high


def steady(outcome: dict) -> tuple[list[str], list[str]]:
    """Return the table of a scenario, and what misses its target."""
    turns = outcome["turns"]
    rows = [
        "| scheme | samples per update | of each rank | of the oracle | error | quartiles | times stock | times alone "
        "| target |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    missed, ahead = [], []
    for name in turns:
        ratio, unsure, low, high = ratios(turns, name, "oracle")
        target, met = "", True
        if name in AT_LEAST:
            target, met = f"at least {AT_LEAST[name]}", ratio >= AT_LEAST[name]
        elif name in OF_LB_BSP:
            pair, *around = ratios(turns, name, "lb-bsp")
            target = f"at least {OF_LB_BSP[name]} of LB-BSP: {pair:.3f} (error {around[0]:.3f}, "
            target += f"{around[1]:.3f} to {around[2]:.3f})"
            met = pair >= OF_LB_BSP[name]
        if not met:
            missed.append(f"{name} {ratio:.3f}, {target}")
        samples = turns[name]["samples"]
        if name not in GIVEN and round(sum(samples)) == outcome["global_batch"] and ratio > AHEAD:
            ahead.append(name)
        division = " : ".join(f"{x:.0f}" for x in samples)
        over_stock = ratios(turns, name, "stock")[0]
        over_alone = f"{ratios(turns, name, 'alone')[0]:.2f}" if "alone" in turns else ""
        rows.append(
            f"| {name} | {sum(samples):.0f} | {division} | {ratio:.3f} | {unsure:.3f} | {low:.3f} to {high:.3f} | "
            f"{over_stock:.2f} | {over_alone} | {target}{'' if met else ' (**missed**)'} |"
        )
    missed += wrong_oracle(outcome)
    rows += ["", *oracle_notes(outcome)]
    if ahead:
        rows.append(
            f"- With as many samples an update, {' and '.join(ahead)} went more than {AHEAD - 1:.0%} faster than the "
            "oracle, which knows the speeds of its former turns only."
        )
    settings = "; ".join(f"{name}: {what}" for name, what in outcome["settings"].items()) or "none"
    rows.append(f"- Settings other than global_batch={outcome['global_batch']} and the defaults: {settings}.")
    return rows, missed


def oracle_notes(outcome: dict) -> list[str]:
    """Return how the oracle found its split, and whether it was right."""
    notes = [f"- The oracle's split: {tuned}." for tuned in outcome["tuned"]]
    return [*notes, *(f"- In its turns: {in_turns}." for in_turns in outcome["in_turns"])]


def wrong_oracle(outcome: dict) -> list[str]:
    """Return a miss if the oracle is far from right: a scheme near such an oracle shows little."""
    if outcome["off"] <= WRONG:
        return []
    return [f"an oracle to compare with: its split was {outcome['off']:.1%} off in its turns; run it again"]


def switching(outcome: dict) -> tuple[list[str], list[str]]:
    """Compare LB-BSP with an oracle that knows each change."""
    rates = [outcome["turns"][name]["rates"] for name in ("lb-bsp", "oracle")]
    of_turns = [a / b for a, b in zip(*rates, strict=True)]
    ratio, unsure = statistics.median(of_turns), error_of_median(of_turns, len(of_turns))
    text = f"LB-BSP over an oracle that changes in the same round: {ratio:.3f} (error {unsure:.3f}; of each turn: "
    text += ", ".join(f"{r:.3f}" for r in of_turns) + "). Target: at least 0.9."
    missed = [] if ratio >= 0.9 else [f"lb-bsp {ratio:.3f}, at least 0.9"]
    if "variant" in outcome["turns"]:
        pair, unsure, *_ = ratios(outcome["turns"], "variant", "lb-bsp")
        least = OF_LB_BSP["variant"]
        text += f" The variant over LB-BSP as it comes: {pair:.3f} (error {unsure:.3f}). Target: at least {least}."
        missed += [] if pair >= least else [f"variant {pair:.3f} of LB-BSP, at least {least}"]
    return [text, "", *oracle_notes(outcome)], missed + wrong_oracle(outcome)


def stability(outcome: dict) -> tuple[list[str], list[str]]:
    """Check since when the allocation has been at rest."""
    path = outcome["path"]
    text = " → ".join(" : ".join(map(str, each["counts"])) + ("" if each["stable"] else "*") for each in path)
    text += " micro-batches after 0, 1, 2 … epochs (*: not declared stable); samples of each rank in the last round "
    text += " : ".join(map(str, outcome["division"])) + ". "
    since = stable_since(path)
    text += "Not stable at the end. " if since is None else f"Stable after {since} epochs, and from there to the end. "
    met = since is not None and since <= 5
    return [text + "Target: within 5 epochs."], [] if met else [f"self-adaptive stable after {since}, within 5"]


def stable_since(path: list[dict]) -> int | None:
    """Return the epochs after which it was declared stable and changed no more; None if it is not stable at the end."""
    since = None
    for epochs in reversed(range(len(path))):
        if not path[epochs]["stable"] or path[epochs]["counts"] != path[-1]["counts"]:
            break
        since = epochs
    return since


def main() -> int:
    from hvd_hetero.testing import KEEP_MEMORY, launch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="some of the scenarios")
    parser.add_argument("--cycles", type=int, help="turns of every scheme, or epochs; 2 or more")
    parser.add_argument(
        "--variant", help="of LB-BSP, by its name in _variants.py: beside LB-BSP as it comes, for ablation.py"
    )
    parser.add_argument("--write", action="store_true", help="store the tables in benchmarks/results, one of each")
    options = parser.parse_args()
    if options.cycles is not None and options.cycles < 2:
        parser.error("--cycles must be at least 2: fewer turns have no quartiles")
    examples = str(Path(__file__).resolve().parents[1] / "examples")
    missed: list[str] = []
    with Progress() as progress:
        for name in options.only:
            scenario = SCENARIOS[name]
            cycles = options.cycles or scenario.cycles
            task = progress.add_task(f"{name:<10}", total=None)
            arguments = ["--scenario", scenario.kind, "--cycles", cycles, "--factors", *scenario.factors]
            arguments += ["--variant", options.variant] if options.variant else []
            result = launch(
                RANK, len(scenario.factors), arguments, timeout_s=3600, env=KEEP_MEMORY | {"PYTHONPATH": examples},
                on_line=lambda rank, line, task=task: progress.advance(task),
            )  # fmt: skip
            progress.update(task, total=progress.tasks[task].completed or 1)
            outcome = result.reports[0]
            rows, bad = {"steady": steady, "switching": switching, "stability": stability}[scenario.kind](outcome)
            missed += [f"{name}: {each}" for each in bad]
            slowness = "; ".join(outcome["slowness"])
            verdict = f"Missed: {'; '.join(bad) or 'nothing'}."
            title = TITLES[name] + (f". Variant: {options.variant}" if options.variant else "")
            text = "\n".join([f"{title}.", "", *rows, "", f"({slowness})", "", verdict])
            progress.console.print(text, markup=False)
            if options.write:
                write_result(f"{'ablation' if options.variant else 'speed_torch'}_{name}", text)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
