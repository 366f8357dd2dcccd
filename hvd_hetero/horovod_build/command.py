"""``hvd-hetero build-horovod``."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from hvd_hetero.horovod_build.cache import WheelCache, cache_root
from hvd_hetero.horovod_build.compile import build_environment, compile_wheel, default_jobs
from hvd_hetero.horovod_build.edits import PACKAGE_EDITS, SOURCE_EDITS
from hvd_hetero.horovod_build.install import install, is_installed
from hvd_hetero.horovod_build.plan import BuildPlan, find_frameworks, make_plan
from hvd_hetero.horovod_build.progress import Reporter
from hvd_hetero.horovod_build.repack import join_wheels
from hvd_hetero.horovod_build.source import apply_edits, fetch, unpack, verify
from hvd_hetero.horovod_build.toolchain import find_toolchain

__all__ = ["add_arguments", "ensure_wheel", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--install", action="store_true", help="install the wheel into this environment as well")
    parser.add_argument("--force", action="store_true", help="build even if the cache holds the wheel")
    parser.add_argument("--jobs", type=_positive, metavar="N", help="compilers at once (default: one per core)")
    parser.add_argument("--sdist", type=Path, metavar="FILE", help="use this source distribution; download nothing")
    parser.add_argument("--print-path", action="store_true", help="print the wheel's path, and nothing else, on stdout")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--check-tools", action="store_true", help="only look for the compiler, CMake and the rest")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def run(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> int:
    """Run the command."""
    if args.check_tools:
        find_toolchain(environ)
        return 0
    plan = make_plan(find_frameworks(environ), environ)
    cache = WheelCache(cache_root(environ))
    cache.require_own()
    jobs = args.jobs if args.jobs is not None else default_jobs()
    with _terminated_as_exit(), Reporter(Console(stderr=True, quiet=args.quiet)) as reporter:
        reporter.note(plan.title)
        wheel = ensure_wheel(plan, cache, environ, reporter, jobs=jobs, force=args.force, sdist=args.sdist)
        if args.install and not is_installed(wheel):
            with cache.locked(reporter.note):  # two installations at once would trip over each other
                if not is_installed(wheel):
                    reporter.stage("install")
                    install(wheel, plan, cache.entry(plan) / "install.log")
        reporter.note(f"{'installed' if args.install else 'ready'}: {wheel}")
    if args.print_path:
        sys.stdout.write(f"{wheel}\n")
    return 0


def ensure_wheel(
    plan: BuildPlan,
    cache: WheelCache,
    environ: Mapping[str, str],
    reporter: Reporter,
    *,
    jobs: int,
    force: bool = False,
    sdist: Path | None = None,
) -> Path:
    """Return the plan's wheel, from the cache if it is there, else built."""
    if not force and (wheel := cache.find(plan)) is not None:
        return wheel
    reporter.stage("check the tools")
    tools, path = find_toolchain(environ)
    if sdist is not None:
        verify(sdist)
    with cache.locked(reporter.note):
        if not force and (wheel := cache.find(plan)) is not None:
            return wheel  # whoever held the lock has built it
        with cache.workspace() as work:
            compiled = []
            for part in plan.parts:
                found = None if force else cache.find_compiled(part)
                if found is None:
                    log = _empty(cache.compiled_entry(part) / "build.log")
                    if sdist is None:
                        reporter.stage("fetch the source")
                        sdist = fetch(cache.root, work, log)
                    folder = work / part.frameworks[0].module
                    tree = unpack(sdist, folder)
                    apply_edits(tree, SOURCE_EDITS)
                    build_environ = build_environment(part, tools, path, jobs, environ)
                    found = cache.store_compiled(part, compile_wheel(part, tree, build_environ, log, reporter))
                compiled.append(found)
            reporter.stage("edit the wheel")
            log = _empty(cache.entry(plan) / "edit.log")
            return cache.store(plan, join_wheels(compiled, PACKAGE_EDITS, work, log))


def _empty(log: Path) -> Path:
    log.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    log.write_text("")
    return log


@contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """Turn termination, and the terminal's closing, into an exit that ends the compilers and removes the work."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    # What is ignored stays ignored: that is how nohup keeps a build alive.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
