"""Run lint, types, unit tests, gates and distributed tests, all of them whatever fails, and count what ran.

    python scripts/run_tests.py [STAGE ...] [-k EXPRESSION]

The last line is ``N passed, N failed`` (and ``, N skipped``). Each test of pytest counts as one, and so does each
linter, the type check and each gate. The exit code is 0 if nothing failed.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Event
from typing import IO, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
GATES = "scripts/gates"
# A stage that takes longer hangs: the longest, the distributed tests, has a watchdog of minutes for each test. A slow
# or shared machine may take several times as long as a quiet one.
LIMIT_S = 80 * 60.0
# For the unit tests, which are of one process; tests of ranks start their own processes. Each process imports what any
# of its tests needs, so Keras's tests share one, and PyTorch's another. For the others there is one for each
# processor; each collects all tests, which takes it 3 s, and in a fresh clone 10 s.
OF_KERAS = ("tests/unit/keras_callbacks",)
OF_TORCH = (
    "tests/unit/torch_hooks",
    "tests/unit/benchmarks/test_demo_pace.py",
    "tests/unit/prediction/test_prediction_baselines.py",
    "tests/unit/prediction/test_prediction_conformance.py",
    "tests/unit/telemetry/test_exports.py",
    "tests/unit/testing/test_docs_python.py",
)
SIDE_BY_SIDE = (f"--numprocesses={min(os.cpu_count() or 1, 4)}", "--dist=worksteal")
# What runs beside which tests, the first of these that run: they leave a processor alone at times, ranks more often
# than unit tests, and these need but one. Ray's tests wait for its nodes and workers to start.
BESIDE = {"types": ("distributed", "unit"), "ray": ("unit",), "wheel": ("distributed",)}
IN_GAPS = ("mypy",)  # yields to all tests
OF_RAY = "tests/distributed/test_ray.py"
# These mostly wait.
IDLE = ("test_hosts.py", "test_strangers.py", "test_watchdog.py")
SLOWEST = 10  # of each run of pytest, shown at its end
RUNNING: list[subprocess.Popen[bytes]] = []
ENDING = Event()
"""Set when this process is to end: nothing begins any more."""
OUTPUT: ContextVar[IO[str] | None] = ContextVar("OUTPUT", default=None)
"""File that this thread's programs write to; None: this process's output."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1",
}


class Count(NamedTuple):
    """Numbers of tests by outcome."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed" + (f", {self.skipped} skipped" if self.skipped else "")


def main() -> int:
    """Run the stages and return the exit code."""
    stages: dict[str, Callable[[str], list[Count]]] = {
        "lint": lambda _: [checked("ruff", "check", "."), checked("ruff", "format", "--check", ".")],
        "gates": lambda _: import_gates(),
        "types": lambda _: [checked("mypy")],
        "unit": unit,
        "ray": lambda only: [pytest([OF_RAY], only)],
        "distributed": distributed,
        "wheel": lambda _: [checked("python", f"{GATES}/built_wheel.py")],
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"which of {', '.join(stages)} (default: all)")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="pytest: only tests that match")
    args = parser.parse_args()
    if unknown := set(args.stages) - set(stages):
        parser.error(f"there is no stage {', '.join(sorted(unknown))}; there are {', '.join(stages)}")

    chosen = [name for name in stages if name in args.stages or not args.stages]
    hosts = {name: host for name in chosen for host in reversed(BESIDE.get(name, ())) if host in chosen}
    results: dict[str, Count] = {}
    for name in chosen:
        if name in hosts:
            continue
        others = [other for other in chosen if hosts.get(other) == name]
        with ExitStack() as stack:
            ends = {other: stack.enter_context(beside(stage, other, stages[other], args.k)) for other in others}
            results[name] = stage(name, stages[name], args.k)
            results |= {other: end() for other, end in ends.items()}
    counts = {name: results[name] for name in chosen}
    overall = total(counts.values())
    if overall.failed:
        say("\nfailed: " + ", ".join(name for name, count in counts.items() if count.failed))
    say(f"\n{overall}")
    return 1 if overall.failed or not overall.passed else 0


def stage(name: str, run_all: Callable[[str], list[Count]], only: str) -> Count:
    """Run one stage, and print how it has ended and how long it took."""
    start_s = time.monotonic()
    say(f"\n=== {name} ===")
    count = total(run_all(only))
    say(f"--- {name}: {count} ({time.monotonic() - start_s:.0f} s)")
    return count


@contextmanager
def beside(task: Callable[..., Count], *arguments: object) -> Iterator[Callable[[], Count]]:
    """Run a task meanwhile, and yield a function that waits for its count. Its output is always shown at the end."""
    with tempfile.TemporaryFile("w+", errors="replace") as file, ThreadPoolExecutor(1) as pool:

        def run_it() -> Count:
            OUTPUT.set(file)
            return task(*arguments)

        later = pool.submit(run_it)
        try:
            yield later.result
        except BaseException:  # this process is to end, so nothing runs on
            ENDING.set()
            end(list(RUNNING))
            raise
        finally:
            wait([later])
            file.seek(0)
            say(file.read())


def unit(only: str) -> list[Count]:
    """Run the tests of one process, TensorFlow's and PyTorch's beside the others."""
    others = ["tests/unit", *(f"--ignore={path}" for path in (*OF_KERAS, *OF_TORCH)), *SIDE_BY_SIDE]
    with beside(pytest, OF_KERAS, only) as of_keras, beside(pytest, OF_TORCH, only) as of_torch:
        return [pytest(others, only), of_keras(), of_torch()]


def distributed(only: str) -> list[Count]:
    """Run two halves side by side, since jobs wait much, and beside them a task that does little else.

    One half has the tests with Keras in their names: TensorFlow is imported there alone. Three equal parts take more of
    the processors: waiting ranks keep polling.
    """
    idle, others = [], []
    for file in sorted((ROOT / "tests/distributed").glob("test_*.py")):
        path = str(file.relative_to(ROOT))
        if path != OF_RAY:
            (idle if file.name in IDLE else others).append(path)
    keras, no_keras = (f"({only}) and {half}" if only else half for half in ("keras", "not keras"))
    with beside(pytest, others, keras) as of_keras, beside(pytest, idle, only) as of_idle:
        return [pytest(others, no_keras), of_keras(), of_idle()]


def pytest(arguments: Iterable[str], only: str) -> Count:
    """Run the tests that are named to pytest, and count them from pytest's own record."""
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory, "record.xml")
        options = ["-q", f"--durations={SLOWEST}", f"--junitxml={record}", *(["-k", only] if only else [])]
        code = run("python", "-m", "pytest", *arguments, *options)
        try:
            suites = ElementTree.parse(record).getroot().iter("testsuite")
            count = total(counted(suite.attrib) for suite in suites)
        except (OSError, ElementTree.ParseError) as reason:
            say(f"pytest left no record of what it ran ({reason})")
            count = Count()
    nothing_matched = code == 5 and bool(only)
    if code != 0 and not count.failed and not nothing_matched:
        say(f"pytest ended with exit code {code}, which counts as a failure")
        return total([count, Count(failed=1)])
    return count


def counted(suite: dict[str, str]) -> Count:
    """Read a suite's attributes; an error in a fixture or on import is a failure too."""
    failed, skipped = int(suite["failures"]) + int(suite["errors"]), int(suite["skipped"])
    return Count(int(suite["tests"]) - failed - skipped, failed, skipped)


def import_gates() -> list[Count]:
    """Check code and docs, and import the core with nothing, and each adapter with only its own framework.

    The adapters are imported side by side, before any test: in a new environment that leaves the frameworks compiled
    for all that follows, where processes that import one at the same time would each compile it.
    """
    adapters = [name for name in ("torch_hooks", "keras_callbacks") if any((ROOT / name).glob("*.py"))]
    with ExitStack() as stack:
        ends = [stack.enter_context(beside(checked, "python", f"{GATES}/adapter_alone.py", name)) for name in adapters]
        others = [
            checked("python", f"{GATES}/{name}.py") for name in ("house", "size", "docs", "glossary", "bare_import")
        ]
        return others + [end() for end in ends]


def checked(program: str, *arguments: str) -> Count:
    """Run a program that counts as one test."""
    say(f"$ {' '.join((program, *arguments))}")
    return Count(passed=1) if run(program, *arguments) == 0 else Count(failed=1)


def run(program: str, *arguments: str) -> int:
    """Run a program of this environment, end it with all that it started after the limit, and return its exit code."""
    output = OUTPUT.get()
    executable = sys.executable if program == "python" else str(Path(sys.executable).parent / program)
    process = subprocess.Popen(
        [*(["nice"] if program in IN_GAPS else []), executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    RUNNING.append(process)
    try:
        if ENDING.is_set():
            end([process])
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        say(f"{program} did not end within {LIMIT_S / 60:.0f} minutes")
        return 124
    finally:
        end([process])
        RUNNING.remove(process)


def end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kill the processes that still run, with all that they started."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def total(counts: Iterable[Count]) -> Count:
    """Add counts."""
    result = Count()
    for count in counts:
        result = Count(*(a + b for a, b in zip(result, count, strict=True)))
    return result


def say(text: str) -> None:
    """Write a line at once: the programs that are run write to the same place."""
    print(text, flush=True, file=OUTPUT.get())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what is running is ended too
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
