"""What every scheme gains on ranks of unequal speed, on real Horovod ranks: samples per second, as ratios of one run.

    python benchmarks/speed_torch.py [--write] [--only NAME ...]

All schemes train the demo's convolutional network, each one of its own, in alternating turns of a few rounds of one
job: stock Horovod (``hvd.DistributedOptimizer`` and the stock sampler), the oracle (stock Horovod, with the split set
by hand: tuned beforehand, in real training, until all ranks are at work equally long), and the schemes of this
project. Each turn gives one ratio to the oracle's turn of the same cycle; the table has medians and quartiles. No
absolute time is a result.

A round holds 384 samples. Of a non-blocking round slow ranks do a part only, so each rank may do as many there as the
fastest has in the oracle's split: then these rounds hold about as many as the others, and updates are as frequent.

Ranks are slowed down by a processor quota, and three ranks on two cores by a sleep proportional to their computing.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

RANK = Path(__file__).with_name("_speed_rank.py")


@dataclass(frozen=True)
class Scenario:
    """One launch."""

    kind: str
    factors: tuple[float, ...]
    """how many times slower each rank is"""
    cycles: int


SCENARIOS = {
    "half": Scenario("steady", (1, 2), 10),
    "third": Scenario("steady", (1, 3), 8),
    "three": Scenario("steady", (1, 2, 3), 8),
    "switching": Scenario("switching", (1, 2), 6),
    "stability": Scenario("stability", (1, 2), 7),
}
TITLES = {
    "half": "One of two ranks at half speed",
    "third": "One of two ranks at a third",
    "three": "Three ranks at 1 : 1/2 : 1/3",
    "switching": "One of two ranks at half speed, another one every 60 rounds",
    "stability": "Self-adaptive allocation from 9 : 1 on ranks of 1 : 1/2",
}
AHEAD = 1.03  # of the oracle: more than such a scheme can owe to anything but the oracle's being fixed
AT_LEAST = {"lb-bsp": 0.95, "non-blocking": 0.88, "elastic-bsp": 0.88}


def steady(outcome: dict) -> tuple[list[str], list[str]]:
    """The table of a scenario, and what of it misses its target."""
    turns = outcome["turns"]
    ratios = {name: [a / b for a, b in zip(turns[name], turns["oracle"], strict=True)] for name in turns}
    medians = {name: statistics.median(of) for name, of in ratios.items()}
    rows = ["| scheme | of the oracle | quartiles | times stock | target |", "|---|---:|---:|---:|---|"]
    missed = []
    for name, of in ratios.items():
        low, _, high = statistics.quantiles(of, n=4)
        over_stock = statistics.median(a / b for a, b in zip(turns[name], turns["stock"], strict=True))
        target, met = "", True
        if name in AT_LEAST:
            target, met = f"at least {AT_LEAST[name]}", medians[name] >= AT_LEAST[name]
        elif name == "self-adaptive":
            target, met = "within 0.03 of LB-BSP", medians[name] >= medians["lb-bsp"] - 0.03
        if not met:
            missed.append(f"{name} {medians[name]:.3f}, {target}")
        rows.append(
            f"| {name} | {medians[name]:.3f} | {low:.3f} to {high:.3f} | {over_stock:.2f} | "
            f"{target}{'' if met else ' (**missed**)'} |"
        )
    ahead = [name for name in ("lb-bsp", "self-adaptive") if medians[name] > AHEAD]
    rows += ["", *oracle_notes(outcome)]
    if ahead:
        rows.append(
            f"- With as many samples a round, {' and '.join(ahead)} went more than {AHEAD - 1:.0%} faster than the "
            "oracle: the oracle is fixed; the scheme follows the machine."
        )
    rows.append(f"- Self-adaptive allocation came to {outcome['weights']}.")
    return rows, missed


def oracle_notes(outcome: dict) -> list[str]:
    """How its split came about, and whether it was right."""
    notes = [f"- The oracle's split: {tuned}." for tuned in outcome["tuned"]]
    return [*notes, *([f"- In its turns: {outcome['in_turns']}."] if "in_turns" in outcome else [])]


def switching(outcome: dict) -> tuple[list[str], list[str]]:
    """LB-BSP against an oracle that knows of each change."""
    turns = outcome["turns"]
    ratios = [a / b for a, b in zip(turns["lb-bsp"], turns["oracle"], strict=True)]
    ratio = statistics.median(ratios)
    text = f"LB-BSP over an oracle that changes in the same round: {ratio:.3f} (of each turn: "
    text += ", ".join(f"{r:.3f}" for r in ratios) + "). Target: at least 0.9."
    return [text, "", *oracle_notes(outcome)], [] if ratio >= 0.9 else [f"lb-bsp {ratio:.3f}, at least 0.9"]


def stability(outcome: dict) -> tuple[list[str], list[str]]:
    """When the allocation came to rest."""
    path = " → ".join(" : ".join(map(str, weights)) for weights in outcome["path"])
    after = outcome["stable_after"]
    text = f"{path}; declared stable after epoch {after}. Target: within 5 epochs."
    return [text], [] if after is not None and after <= 5 else [f"self-adaptive stable after {after}, within 5"]


def main() -> int:
    from _report import write_result

    from hvd_hetero.testing import KEEP_MEMORY, launch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="some of the scenarios")
    parser.add_argument("--cycles", type=int, help="turns of every scheme")
    parser.add_argument("--write", action="store_true", help="store the tables in benchmarks/results, one of each")
    options = parser.parse_args()
    examples = str(Path(__file__).resolve().parents[1] / "examples")
    missed: list[str] = []
    with Progress() as progress:
        for name in options.only:
            scenario = SCENARIOS[name]
            cycles = options.cycles or scenario.cycles
            task = progress.add_task(f"{name:<10}", total=None)
            arguments = ["--scenario", scenario.kind, "--cycles", cycles, "--factors", *scenario.factors]
            result = launch(
                RANK, len(scenario.factors), arguments, timeout_s=900, env=KEEP_MEMORY | {"PYTHONPATH": examples},
                on_line=lambda rank, line, task=task: progress.advance(task),
            )  # fmt: skip
            progress.update(task, total=progress.tasks[task].completed or 1)
            outcome = result.reports[0]
            rows, bad = {"steady": steady, "switching": switching, "stability": stability}[scenario.kind](outcome)
            missed += [f"{name}: {each}" for each in bad]
            slowness = "; ".join(outcome["slowness"])
            verdict = f"Missed: {'; '.join(bad) or 'nothing'}."
            text = "\n".join([f"{TITLES[name]}: samples per second.", "", *rows, "", f"({slowness})", "", verdict])
            progress.console.print(text, markup=False)
            if options.write:
                write_result(f"speed_torch_{name}", text, f"speed_torch.py --only {name}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
