"""Random faults, and whether anything was lost: N elastic jobs of 2 to 4 real ranks, each with its own schedule.

    python benchmarks/reliability.py [--schedules 100] [--first 0] [--jobs 3] [--write]
    python benchmarks/reliability_throughput.py             (how long a recovery takes, and what is left of the speed)

A schedule's number is its seed. It draws the number of ranks, how often to commit, and one to four faults in random
rounds; trainings of both frameworks take turns. Ranks are killed when a round begins or with their gradients on the way
(also two at once, also rank 0), frozen for half a second, slowed down, made to report absurd speeds, or join; in a
third of the jobs a spare waits to take a lost rank's place, and in a third of these it is killed as it takes it, while
the others meet it. In one of seven, each rank is on a separate host (a network namespace, where they can be made),
and links are cut for up to four seconds. In a few, a rank is gone without having ended: its process is stopped, or its
link cut, for good. Each job is checked:

    it ends                     within the watchdog's limit, with the ranks that should be left
    every sample once           the samples of each epoch, written down from the batches themselves
    ranks identical             parameters of all ranks at the end, bit by bit
    the same result             parameters against one process without faults that takes the same samples in the same
                                rounds: equal to 1e-9 if gradients are averaged exactly; the loss within a tenth of
                                the one process's under local updates, D-PSGD and MATCHA, whose steps are others

Ranks are forked from a process that has imported their modules. Recovery lasts from the last round of a membership
until the next one is ready for its first: noticing, meeting again, restoring. It is real time, on a machine that has
other jobs beside it. A rank may wait for a lost one until HOROVOD_GLOO_TIMEOUT_SECONDS are over (--patience).

With --write, the table is stored under the numbers of the schedules: runs add up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from _reliability import faults_of, loss, problem, read, replayed
from _reliability_schedules import FOR_GOOD_S, KINDS, SAMPLES, TRAININGS, Schedule, schedule
from _support import Hosts, Preloaded, hosts_available

from hvd_hetero.testing import Elastic, LaunchError, launch

HERE = Path(__file__).parent
RANKS = {"PyTorch": HERE / "_reliability_rank.py", "Keras": HERE / "_reliability_rank_keras.py"}
MODULES = {
    "PyTorch": ("torch", "torch._dynamo", "horovod.torch", "torch_hooks"),
    "Keras": ("horovod.tensorflow", "keras_callbacks"),
}


@contextmanager
def cut(hosts: Hosts, cuts: list[tuple[int, int, float]], directory: Path) -> Iterator[set[int]]:
    """Cut links when their rounds are over, by the logs of the ranks; yield the numbers of the cuts so far."""
    done: set[int] = set()
    stop = threading.Event()

    def rounds() -> int:
        return max((file.read_text().count('"finished"') for file in directory.glob("*.jsonl")), default=0)

    def follow() -> None:
        while len(done) < len(cuts) and not stop.wait(0.02):
            for number, (host, at, seconds) in enumerate(cuts):
                if number not in done and rounds() >= at:
                    hosts.cut(host)
                    done.add(number)
                    stop.wait(seconds)
                    hosts.mend(host)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()


def started(plan: Schedule, directory: Path, preloaded: Preloaded, timeout_s: float, patience_s: int) -> set[int]:
    """Launch a job, wait for its end, and return which cuts of links were made."""
    job = json.dumps(plan.job | {"directory": str(directory)})
    common: dict[str, Any] = {
        "timeout_s": timeout_s, "env": {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(patience_s), **preloaded.variables}
    }  # fmt: skip
    if not plan.cuts:
        launch(RANKS[plan.framework], plan.ranks, [job], elastic=Elastic(spares=plan.spares), **common)
        return set()
    with Hosts(plan.ranks, delay_s=0.0005) as hosts, cut(hosts, plan.cuts, directory) as done:
        starter = hosts.horovodrun(options=["--min-np", "1", "--max-np", str(plan.ranks), "--reset-limit", "20"])
        launch(RANKS[plan.framework], plan.ranks, [job], starter=starter, **common)
    return done


def run(plan: Schedule, preloaded: Preloaded, timeout_s: float, patience_s: int) -> dict[str, Any]:
    """Launch a job and judge it."""
    outcome: dict[str, Any] = {"wrong": [], "recovery_s": [], "lost": 0, "difference": 0.0, "visited": 0}
    job = plan.job
    with tempfile.TemporaryDirectory(prefix="hvd-hetero-reliability-") as name:
        directory = Path(name)
        try:
            cuts = started(plan, directory, preloaded, timeout_s, patience_s)
        except LaunchError as error:
            outcome["wrong"].append(f"{type(error).__name__}: {error}")
            return outcome
        record = read(directory)
        reports = record.ends
        struck = {int(file.suffix[1:]) for file in directory.glob("fault.*")}
        spare_lost = (directory / "spare.lost").exists()
    outcome["struck"] = Counter(
        "gone" if options.get("seconds") == FOR_GOOD_S else kind
        for i, (kind, options) in enumerate(job["faults"])
        if kind == "report" or i in struck  # a slow rank may be dead by the time of another fault of its
    )
    outcome["struck"].update("gone" if plan.cuts[i][2] == FOR_GOOD_S else "cut" for i in cuts)
    outcome["struck"]["spare"] += spare_lost
    outcome["recovery_s"], outcome["lost"] = record.recovery_s, record.lost
    outcome["visited"] = sum(len(samples) for _, samples in record.rounds)
    if (wrong := faults_of(record, SAMPLES, job["epochs"])) is not None:
        outcome["wrong"].append(wrong)
    sizes = {report["size"] for report in reports}
    if sizes != {len(reports)} or len(reports) < plan.left:
        outcome["wrong"].append(f"{len(reports)} ranks reported at the end, of sizes {sizes}; {plan.left} are left")
    if any(report["parameters"] != reports[0]["parameters"] for report in reports):
        outcome["wrong"].append("ranks differ at the end")
    single = replayed(
        record.rounds, [job["rate"]] * len(record.rounds), job["momentum"], SAMPLES, plan.framework
    ).tolist()
    if plan.exact:
        outcome["difference"] = max(abs(a - b) for a, b in zip(single, reports[0]["parameters"], strict=True))
        if not outcome["difference"] < 1e-9:
            outcome["wrong"].append(f"parameters are {outcome['difference']:.2g} from those of one process")
    else:
        ratio = loss(reports[0]["parameters"], SAMPLES, plan.framework) / loss(single, SAMPLES, plan.framework)
        outcome["ratio"] = ratio
        if not 0.9 < ratio < 1.1:
            outcome["wrong"].append(f"the loss is {ratio:.3f} times that of one process")
    return outcome


def table(done: list[tuple[Schedule, dict[str, Any]]]) -> str:
    """Return a line for each training."""
    lines = [
        f"| training | jobs | spares | {' | '.join(KINDS)} | samples visited | done again | "
        "recovery, median and longest s | parameters off by | wrong |",
        "|---|" + "---:|" * (len(KINDS) + 7),
    ]
    place = {training: number for number, training in enumerate(TRAININGS)}
    by_name = sorted(done, key=lambda each: place[each[0].framework, each[0].name])
    for (framework, name), group in itertools.groupby(by_name, key=lambda each: (each[0].framework, each[0].name)):
        plans, outcomes = zip(*group, strict=True)
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
            f"| {framework}, {name} | {len(outcomes)} | {sum(plan.spares for plan in plans)} | "
            f"{' | '.join(str(struck[kind]) for kind in KINDS)} | "
            f"{sum(o['visited'] for o in outcomes)} | {sum(o['lost'] for o in outcomes)} | {times} | {off} | "
            f"{sum(bool(o['wrong']) for o in outcomes)} |"
        )
    return "\n".join(lines)


def main() -> int:
    from _report import write_result
    from rich.progress import Progress

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once: most of the time they wait (default 1)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a job is one that hangs")
    parser.add_argument("--patience", type=int, default=30, help="HOROVOD_GLOO_TIMEOUT_SECONDS (default 30)")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    links = hosts_available()
    if not links:
        print(f"no link is cut: {links.why}", file=sys.stderr)
    plans = [schedule(number, bool(links)) for number in range(options.first, options.first + options.schedules)]
    done = []
    with ExitStack() as stack, Progress() as progress, ThreadPoolExecutor(options.jobs) as pool:
        preloaded = {name: stack.enter_context(Preloaded(*MODULES[name])) for name in {p.framework for p in plans}}
        for framework in preloaded:
            problem(SAMPLES, framework)  # once, before there are threads
        task = progress.add_task("schedules", total=options.schedules)
        judge = lambda plan: run(plan, preloaded[plan.framework], options.timeout, options.patience)  # noqa: E731
        for plan, outcome in zip(plans, pool.map(judge, plans), strict=True):
            done.append((plan, outcome))
            for wrong in outcome["wrong"]:
                progress.console.print(f"schedule {plan}\n{wrong}", markup=False)
            progress.advance(task)
    wrong = sum(bool(outcome["wrong"]) for _, outcome in done)
    verdict = f"{len(done)} schedules, {options.first} to {plans[-1].number}, {wrong} with something wrong."
    text = f"{verdict}\n\n{table(done)}\n\n" + (
        "Done again: samples computed in rounds that were lost, between the last commit and the failure. "
        "How each figure comes about: the docstring of `benchmarks/reliability.py`."
    )
    print(text)
    if options.write:
        print(f"written to {write_result(f'reliability_{options.first}_to_{plans[-1].number}', text)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
