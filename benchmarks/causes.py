"""Runs with a known cause, and clean ones: right causes and false alarms.

    sudo python benchmarks/causes.py [--write] [--only [CAUSE ...]] [--each N] [--clean N] [--turns N] [--seconds S]
                                     [--keep FOLDER]
    python benchmarks/causes.py --again FOLDER [--write]    # judge kept runs again, without training

Two ranks of PyTorch, each pinned to a core and on one thread, train a small network. In each run one rank is slow for
one cause, in four strengths, half of the runs under BSP and half under LB-BSP, on either rank:

- quota: a control group holds the rank to a share of a core
- competitor: another process computes on the rank's core, at a niceness
- loader: the rank's data set takes its time for each sample
- network: the ranks run in network namespaces (`hvd_hetero.testing.Hosts`), whose links ``tc`` holds to a rate
- work: the rank computes more for each sample, for no reason that its machine could show

In runs in turns, each rank computes three times as much in every second round, the other rank in the rounds between,
while another process takes the same share of either core, 5 to 20 %. That explains no difference.

"Costs" is for which share of the run the rank held all others up (``hvd_hetero.tools.report.attribution``). Under
LB-BSP a slow rank costs little, and gets its cause for being slow.

``hvd_hetero.tools.report.causes`` reads only the run's file. An answer is right if the slow rank gets its
cause and the other rank none (the network is the cause on both), and if the verdict, which a user of the report reads
first, names this cause and no other. A clean run is right if no rank gets any, and the verdict is that nothing is
wrong; a run in turns, if the verdict is that the ranks took turns, and names no cause. "Verdict" is what it is about,
and the causes that it names.

Needs a quiet machine, since anything else that runs there is another cause, and root for quotas and namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import psutil
from _report import write_result
from _support import Hosts, Preloaded, hosts_available
from rich.progress import track

from hvd_hetero.telemetry import read_run
from hvd_hetero.testing import launch, quota_available
from hvd_hetero.tools.report.build import report_of

MTU = 65000  # large packets: each costs a processor as much as some kilobytes
RANKS, POLICIES = 2, ("bsp", "lb-bsp")
LEAST_RIGHT = 19  # of twenty
BUSY_PERCENT = 10.0  # of the machine: below that, nothing else runs to speak of


@dataclass(frozen=True)
class Known:
    """A cause that runs are given: the kind that must be named, how strengths are written, and the strengths."""

    kind: str
    told: str
    strengths: tuple[float, ...]


CAUSES = {
    "quota": Known("throttled", "{:g} of a core", (0.4, 0.55, 0.7, 0.8)),
    "competitor": Known("competition", "niceness {:g}", (0, 0, 3, 5)),
    "loader": Known("input", "{:g} ms a sample", (0.03, 0.05, 0.08, 0.12)),
    "network": Known("network", "{:g} Mbit/s", (150, 300, 500, 800)),
    "work": Known("slower", "{:g} products more", (0.5, 1.0, 1.5, 2.0)),
}
CLEAN, TURNS = "clean", "turns"
SHARES = (0.05, 0.08, 0.12, 0.16, 0.2)  # of either core, that another process takes in runs in turns


@dataclass(frozen=True)
class Outcome:
    """The settings of a run, and what was said about it."""

    cause: str
    given: str
    policy: str
    slow: int
    cost: list[float]
    transfer: float
    named: list[str]
    evidence: str
    verdict: str
    """Topic of the verdict: a kind of `Verdict`."""
    why: tuple[str, ...]
    """The kinds of causes that the verdict names."""
    idle: bool | None = True
    """True if the machine was idle when the run began; None: not known."""

    @property
    def right(self) -> bool:
        """True if only the slow rank got its cause, and the verdict names it; the network is all ranks'."""
        if self.cause == CLEAN:
            return self.named == [""] * RANKS and self.verdict == "nothing"
        if self.cause == TURNS:
            return (self.verdict, self.why) == ("computing", ())
        kind = CAUSES[self.cause].kind
        return self.why == (kind,) and self.named == [
            kind if rank == self.slow or self.cause == "network" else "" for rank in range(RANKS)
        ]


def unavailable(cause: str) -> str:
    """Return why a cause cannot be made here; "": it can."""
    if cause == "quota":
        support = quota_available()
        return "" if support else support.why
    if cause == "network":
        if not (support := hosts_available()):
            return support.why
        return "" if shutil.which("tc") else "there is no tc; install iproute2"
    return ""


@contextlib.contextmanager
def slow_link(mbit: float) -> Iterator[list[str]]:
    """Yield a command that starts a rank on each of two hosts, whose links carry so many megabits per second."""
    with Hosts(RANKS, mtu=MTU) as hosts:
        for host in range(RANKS):
            rule = f"qdisc add dev {hosts.interface} root tbf rate {mbit:g}mbit burst 256kb latency 1s"
            subprocess.run([*hosts.on(host), "tc", *rule.split()], check=True, timeout=10, capture_output=True)
        yield hosts.horovodrun()


def wait_until_idle() -> bool:
    """Wait, for at most ten seconds, for one in which other processes leave the cores alone; return whether it came."""
    return any(psutil.cpu_percent(interval=1.0) < BUSY_PERCENT for _ in range(10))


def given(cause: str, number: int) -> tuple[float, str, int]:
    """Return the strength, the policy and the slow rank of a run."""
    known = CAUSES.get(cause)
    strengths = known.strengths if known else SHARES if cause == TURNS else (0.0,)
    strength = strengths[number % len(strengths)]
    return strength, POLICIES[number % 2], number // 2 % RANKS


def measure(cause: str, number: int, seconds: float, preloaded: Preloaded, keep: Path | None) -> Outcome:
    """Make one run and determine its causes."""
    idle = wait_until_idle()
    strength, policy, slow = given(cause, number)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder) / f"{cause}_{number}.jsonl"
        starter = stack.enter_context(slow_link(strength)) if cause == "network" else []
        arguments = ["--cause", cause, "--strength", strength, "--slow", slow, "--policy", policy]
        launch(
            Path(__file__).with_name("_causes_rank.py"), RANKS,
            [*arguments, "--seconds", seconds, "--telemetry", path],
            timeout_s=8 * seconds + 120, env={"OMP_NUM_THREADS": "1", **preloaded.variables}, starter=starter,
        )  # fmt: skip
        if keep is not None:
            shutil.copy(path, keep)
        return judged(path, cause, number, idle)


def judged(path: Path, cause: str, number: int, idle: bool | None) -> Outcome:
    """Return the causes and the verdict of a run. ``idle``: None if that is no longer known."""
    strength, policy, slow = given(cause, number)
    report = report_of(read_run(path), path.name, replayed=False)
    found = report.causes
    return Outcome(
        cause,
        CAUSES[cause].told.format(strength) if cause in CAUSES else f"{strength:.0%} of both" if strength else "",
        policy,
        slow,
        report.figures.ranks.cost.tolist(),
        report.figures.kinds["transfer"],
        [c.kind if c else "" for c in found],
        next((f"rank {rank}: {c.evidence}" for rank, c in enumerate(found) if c), ""),
        report.verdict.kind,
        report.verdict.causes,
        idle,
    )


def kept(folder: Path) -> Iterator[Outcome]:
    """Judge the runs that ``--keep`` has left in a folder, in the order in which they were made."""
    for cause in (CLEAN, TURNS, *CAUSES):
        for path in sorted(folder.glob(f"{cause}_*.jsonl"), key=lambda path: int(path.stem.rpartition("_")[2])):
            yield judged(path, cause, int(path.stem.rpartition("_")[2]), None)


def table(outcomes: list[Outcome], skipped: dict[str, str]) -> tuple[str, bool]:
    """Return the text for the results, and whether the targets are met."""
    lines = [
        "| cause | given | policy | slow rank | costs, rank 0, 1 | transfer | named, rank 0, 1 | evidence | verdict "
        "| right |",
        "|---|---|---|---:|---:|---:|---|---|---|---|",
    ]
    for o in outcomes:
        slow = {CLEAN: "none", "network": "both", TURNS: "in turns"}.get(o.cause, str(o.slow))
        costs, named = ", ".join(f"{c:.0%}" for c in o.cost), ", ".join(name or "none" for name in o.named)
        lines.append(
            f"| {o.cause} | {o.given} | {o.policy} | {slow} | {costs} | {o.transfer:.0%} | {named} | {o.evidence} "
            f"| {': '.join((o.verdict, *o.why))} | {'yes' if o.right else '**no**'} |"
        )
    known = [o for o in outcomes if o.cause not in (CLEAN, TURNS)]
    clean, turns = ([o for o in outcomes if o.cause == cause] for cause in (CLEAN, TURNS))
    right, alarms = sum(o.right for o in known), sum(not o.right for o in clean)
    blamed = sum(not o.right for o in turns)
    met = (not known or right * 20 >= LEAST_RIGHT * len(known)) and alarms == blamed == 0 and bool(outcomes)
    lines += ["", *(f"Skipped: {cause}, because {why}." for cause, why in skipped.items()), ""]
    if busy := sum(o.idle is False for o in outcomes):
        lines.append(f"In {busy} runs something else ran on the machine at the start.")
    lines.append(
        f"Right: {right} of {len(known)} runs with a known cause; alarms in {alarms} of {len(clean)} clean runs, and "
        f"ranks blamed in {blamed} of {len(turns)} runs in turns. "
        f"Target: {LEAST_RIGHT} of 20, and none: {'met' if met else '**missed**'}."
    )
    return "\n".join(lines), met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    parser.add_argument("--only", nargs="*", choices=CAUSES, default=list(CAUSES), help="these causes")
    parser.add_argument("--each", type=int, default=4, help="runs of each cause (default 4)")
    parser.add_argument("--clean", type=int, default=10, help="clean runs (default 10)")
    parser.add_argument("--turns", type=int, default=5, help="runs of ranks in turns (default 5)")
    parser.add_argument("--keep", type=Path, help="copy the runs' files into this folder")
    parser.add_argument("--seconds", type=float, default=8.0, help="of training in a run (default 8)")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="judge the runs that --keep left there, make none")
    options = parser.parse_args()
    skipped: dict[str, str] = {}
    outcomes = list(kept(options.again)) if options.again else []
    if not options.again:
        skipped = {cause: why for cause in options.only if (why := unavailable(cause))}
        jobs = [(CLEAN, number) for number in range(options.clean)]
        jobs += [(TURNS, number) for number in range(options.turns)]
        jobs += [(cause, number) for cause in options.only if cause not in skipped for number in range(options.each)]
        with Preloaded("torch", "torch._dynamo", "horovod.torch", "torch_hooks") as preloaded:
            for cause, number in track(jobs, "runs"):
                outcomes.append(measure(cause, number, options.seconds, preloaded, options.keep))
                print(outcomes[-1])
    text, met = table(outcomes, skipped)
    if options.again:
        newest = max(path.stat().st_mtime for path in options.again.glob("*.jsonl"))
        text += f"\nThe runs are of {date.fromtimestamp(newest).isoformat()} and were judged again."
    print(text)
    if options.write:
        write_result("causes", text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
