"""What ``hvd-hetero build-horovod`` does."""

import os
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from horovod_build.cache import WheelCache, cache_root
from horovod_build.compile import build_environment, compile_wheel, default_jobs
from horovod_build.patches import apply, patch_command, series
from horovod_build.plan import BuildPlan, find_frameworks, make_plan
from horovod_build.progress import Reporter
from horovod_build.source import fetch, unpack, verify
from horovod_build.toolchain import find_toolchain
from horovod_build.wheel import install, is_installed, join_wheels


def build_horovod(options: Namespace, environ: Mapping[str, str] = os.environ) -> None:
    """Build the wheel for what is installed here, or find it in the cache, and install it if wanted."""
    plan = make_plan(find_frameworks(environ), environ)
    cache = WheelCache(cache_root(environ))
    cache.require_own()
    with _terminated_as_exit(), Reporter(Console(stderr=True, quiet=options.quiet)) as reporter:
        reporter.note(plan.title)
        jobs = options.jobs or default_jobs()
        wheel = ensure_wheel(plan, cache, environ, reporter, jobs=jobs, force=options.force, sdist=options.sdist)
        if options.install and not is_installed(wheel):
            with cache.locked(reporter.note):  # two installations at once would trip over each other
                if not is_installed(wheel):
                    reporter.stage("install")
                    install(wheel, plan, cache.entry(plan) / "install.log")
        reporter.note(f"{'installed' if options.install else 'ready'}: {wheel}")
    if options.print_path:
        sys.stdout.write(f"{wheel}\n")


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
    tools = find_toolchain(environ)
    if sdist is not None:
        verify(sdist)
    with cache.locked(reporter.note):
        if not force and (wheel := cache.find(plan)) is not None:
            return wheel  # whoever held the lock has built it
        with cache.workspace() as work:
            log = cache.new_log(plan)
            if sdist is None:
                reporter.stage("fetch the source")
                sdist = fetch(cache.root, work, log)
            reporter.stage("apply the patches")
            source = unpack(sdist, work / "source")
            apply(source, series(), patch_command(tools["PATH"]), log)
            wheels = []
            for part in plan.parts:
                found = None if force else cache.find(part)
                if found is None:
                    tree = shutil.copytree(source, work / part.frameworks[0].module / source.name)
                    variables = build_environment(part, tools, jobs, environ)
                    found = cache.store(part, compile_wheel(part, tree, variables, cache.new_log(part), reporter))
                wheels.append(found)
            reporter.stage("pack the wheel")
            return cache.store(plan, join_wheels(wheels, source, series(), work, log))


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
