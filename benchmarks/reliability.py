"""Random faults, and whether anything was lost: N elastic jobs of 2 to 4 real ranks, each with its own schedule.

    python benchmarks/reliability.py [--schedules 50] [--first 0] [--jobs 3] [--write]
    python benchmarks/reliability_throughput.py             (what a fault every half minute costs)

A schedule's number is its seed. It draws the number of ranks, how often to commit, and one to four faults in random
rounds; policies take turns. Ranks are killed when a round begins or with their gradients on the way (also two at once,
also rank 0), frozen for half a second, slowed down, made to report absurd speeds, or join. Each job is checked:

    it ends                     within the watchdog's limit, with the ranks that should be left
    every sample once           the samples of each epoch, written down from the batches themselves
    ranks identical             parameters of all ranks at the end, bit by bit
    the same result             parameters against one process without faults that takes the same samples in the same
                                rounds: equal to 1e-9 where gradients are averaged exactly; the loss within a tenth of
                                the one process's under local updates and D-PSGD, whose steps are others by design

Recovery lasts from the last round of a membership until the next one is ready for its first: noticing, meeting again
(with the start of a rank that joins), restoring. It is real time, on a machine that may have other work: launch with
--jobs 1 on an idle one. A second table has it step by step, from the telemetry of the jobs, until the first round is
over. There, `notice` is from the kill on, and so is the total. A rank may wait for a lost one until
HOROVOD_GLOO_TIMEOUT_SECONDS are over (--patience). The others wait as long for a rank that joins, so this must be
longer than a start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RANK = Path(__file__).with_name("_reliability_rank.py")
SAMPLES, EPOCHS, GLOBAL_BATCH = 150, 4, 24
FIRST, LAST = 2, 14  # rounds in which faults happen: all jobs have more, and a last commit may come before
EXACT = {
    "bsp": {}, "static": {}, "lb-bsp": {}, "self-adaptive": {}, "non-blocking": {}, "elastic-bsp": {},
    "lb-bsp, 2 workers": {"policy": "lb-bsp", "num_workers": 2},
    "lb-bsp, stream": {"policy": "lb-bsp", "stream": "whole"},
}  # fmt: skip
# More epochs and less momentum, for what is compared there are losses, which must have converged.
CONVERGES = {"epochs": 30, "momentum": 0.5, "rate": 0.05}
OTHER = {
    "elastic-bsp, local": CONVERGES,
    "non-blocking, d-psgd": {"policy": "non-blocking", "sync": "d-psgd", **CONVERGES},
}
LIES = [float("nan"), float("inf"), 0.0, -1.0, 1e6]


def schedule(number: int) -> dict[str, Any]:
    """Return the job of that number."""
    chance = random.Random(number)
    name = [*EXACT, *OTHER][number % (len(EXACT) + len(OTHER))]
    ranks = chance.choice([2, 3, 4])
    left, faults = ranks, []
    for at in sorted(chance.choices(range(FIRST, LAST), k=chance.randint(1, 4))):
        kind = chance.choice(["kill", "kill", "freeze", "slow", "report", "join"])
        if kind == "kill" and left == 1:
            kind = "join"
        if kind == "join":
            faults.append(["join", {"at": at}])
            continue  # when it takes part is for the next commit to say, so no later fault counts on it
        options: dict[str, Any] = {"rank": chance.randrange(left), "at": at}
        if kind == "kill":
            options["late"] = chance.random() < 0.5
            left -= 1
        elif kind == "freeze":
            options["seconds"] = 0.5
        elif kind == "slow":
            options["factor"] = chance.choice([2, 5])
        else:
            options |= {"value": chance.choice(LIES), "rounds": chance.randint(1, 5)}
        faults.append([kind, options])
    job = {
        "policy": name, "samples": SAMPLES, "epochs": EPOCHS, "global_batch": GLOBAL_BATCH,
        "rounds_per_commit": chance.choice([1, 2, 3, 7]), "faults": faults,
        "seconds_per_sample": chance.sample([1.0, 2.0, 3.0, 5.0], k=4), "rate": 0.02,
    }  # fmt: skip
    return {"number": number, "name": name, "ranks": ranks, "left": left, "job": job | {**EXACT, **OTHER}[name]}


def run(plan: dict[str, Any], timeout_s: float, patience_s: int) -> dict[str, Any]:
    """Launch a job and judge it."""
    from _reliability import faults_of, loss, read, replayed
    from _reliability_rank import MOMENTUM

    from hvd_hetero.testing import Elastic, LaunchError, launch

    outcome: dict[str, Any] = {"wrong": [], "recovery_s": [], "lost": 0, "changes": [], "difference": 0.0, "visited": 0}
    with tempfile.TemporaryDirectory(prefix="hvd-hetero-reliability-") as directory:
        job = plan["job"] | {"directory": directory}
        try:
            launch(
                RANK, plan["ranks"], [json.dumps(job)], timeout_s=timeout_s, elastic=Elastic(least=1),
                env={"HOROVOD_GLOO_TIMEOUT_SECONDS": str(patience_s)},
            )  # fmt: skip
        except LaunchError as error:
            outcome["wrong"].append(f"{type(error).__name__}: {error}")
            return outcome
        record = read(Path(directory))
        reports = record.ends
        struck = {int(file.suffix[1:]) for file in Path(directory).glob("fault.*")}
    outcome["struck"] = Counter(
        kind for i, (kind, _) in enumerate(job["faults"]) if kind == "report" or i in struck
    )  # a slow rank may be dead by the time of another fault of its
    outcome["recovery_s"], outcome["lost"], outcome["changes"] = record.recovery_s, record.lost, record.changes
    outcome["visited"] = sum(len(samples) for _, samples in record.rounds)
    if (wrong := faults_of(record, SAMPLES, job["epochs"])) is not None:
        outcome["wrong"].append(wrong)
    sizes = {report["size"] for report in reports}
    if sizes != {len(reports)} or len(reports) < plan["left"]:
        outcome["wrong"].append(f"{len(reports)} ranks reported at the end, of sizes {sizes}; {plan['left']} are left")
    if any(report["parameters"] != reports[0]["parameters"] for report in reports):
        outcome["wrong"].append("ranks differ at the end")
    single = replayed(
        record.rounds, [job["rate"]] * len(record.rounds), job.get("momentum", MOMENTUM), SAMPLES
    ).tolist()
    if plan["name"] in EXACT:
        outcome["difference"] = max(abs(a - b) for a, b in zip(single, reports[0]["parameters"], strict=True))
        if not outcome["difference"] < 1e-9:
            outcome["wrong"].append(f"parameters are {outcome['difference']:.2g} from those of one process")
    else:
        ratio = loss(reports[0]["parameters"], SAMPLES) / loss(single, SAMPLES)
        outcome["ratio"] = ratio
        if not 0.9 < ratio < 1.1:
            outcome["wrong"].append(f"the loss is {ratio:.3f} times that of one process")
    return outcome


def table(done: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    kinds = ("kill", "join", "freeze", "slow", "report")
    lines = [
        f"| training | jobs | {' | '.join(kinds)} | samples visited | done again | recovery, median and longest s | "
        "parameters off by | wrong |",
        "|---|" + "---:|" * (len(kinds) + 6),
    ]
    by_name = sorted(done, key=lambda each: [*EXACT, *OTHER].index(each[0]["name"]))
    for name, group in itertools.groupby(by_name, key=lambda each: each[0]["name"]):
        outcomes = [outcome for _, outcome in group]
        struck: Counter[str] = sum((outcome.get("struck", Counter()) for outcome in outcomes), Counter())
        recovery_s = [s for outcome in outcomes for s in outcome["recovery_s"]]
        ratios = [outcome["ratio"] for outcome in outcomes if "ratio" in outcome]
        off = (
            f"loss {min(ratios):.3f} to {max(ratios):.3f}"
            if ratios
            else f"{max(outcome['difference'] for outcome in outcomes):.1g}"
        )
        times = f"{statistics.median(recovery_s):.1f}, {max(recovery_s):.1f}" if recovery_s else "-"
        lines.append(
            f"| {name} | {len(outcomes)} | {' | '.join(str(struck[kind]) for kind in kinds)} | "
            f"{sum(o['visited'] for o in outcomes)} | {sum(o['lost'] for o in outcomes)} | {times} | {off} | "
            f"{sum(bool(o['wrong']) for o in outcomes)} |"
        )
    return "\n".join(lines)


def main() -> int:
    import _recoveries
    from _report import write_result
    from rich.progress import Progress

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once: most of the time they wait (default 1)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a job is one that hangs")
    parser.add_argument("--patience", type=int, default=30, help="HOROVOD_GLOO_TIMEOUT_SECONDS (default 30)")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    plans = [schedule(number) for number in range(options.first, options.first + options.schedules)]
    done = []
    with Progress() as progress, ThreadPoolExecutor(options.jobs) as pool:
        task = progress.add_task("schedules", total=options.schedules)
        for plan, outcome in zip(
            plans, pool.map(lambda plan: run(plan, options.timeout, options.patience), plans), strict=True
        ):
            done.append((plan, outcome))
            for wrong in outcome["wrong"]:
                progress.console.print(f"schedule {plan['number']}: {json.dumps(plan['job'])}\n{wrong}", markup=False)
            progress.advance(task)
    wrong = sum(bool(outcome["wrong"]) for _, outcome in done)
    verdict = f"{len(done)} schedules, {options.first} to {plans[-1]['number']}, {wrong} with something wrong."
    by_step = _recoveries.table(change for _, outcome in done for change in outcome["changes"])
    text = f"{verdict}\n\n{table(done)}\n\nRecovery by step, median and longest s:\n\n{by_step}\n\n" + (
        "Done again: samples computed in rounds that were lost, between the last commit and the failure. "
        "How each figure comes about: the docstring of `benchmarks/reliability.py`."
    )
    print(text)
    if options.write:
        print(f"written to {write_result('reliability', text)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
