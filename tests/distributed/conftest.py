"""Every test in here starts processes that wait for one another, so every test has a time limit, and keeps it."""

import faulthandler
import importlib
import os
import signal
from pathlib import Path

import pytest

from hvd_hetero import testing

WORKERS = Path(__file__).parent / "workers"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Above that of each launch (limits.py), which says more. Another one by @pytest.mark.distributed(timeout_s=...).
TIMEOUT_S = 600.0
# Later than the limit, for a main thread in C code that never comes back to run the handler of the limit.
LAST_RESORT_S = 30.0


@pytest.fixture(scope="session")
def real_stderr(pytestconfig):
    """Standard error as it is outside pytest's capture, whose files would be lost when the process is ended."""
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        copy = os.dup(2)
    yield copy
    os.close(copy)


@pytest.fixture(autouse=True)
def watchdog(request, real_stderr):
    """Fail a test that outlives its limit; where even that gets stuck, print all stacks and end pytest.

    `hvd_hetero.testing.launch` has a limit of its own, nearer than this one, that shows the stacks of the ranks; and
    ranks follow their launcher, so that ending pytest ends them.
    """
    marker = request.node.get_closest_marker("distributed")
    limit_s = marker.kwargs.get("timeout_s", TIMEOUT_S) if marker else TIMEOUT_S

    def too_late(signum, frame):
        pytest.fail(f"not done after {limit_s:g} s")

    former = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(limit_s + LAST_RESORT_S, exit=True, file=real_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, former)


@pytest.fixture
def launch():
    """`hvd_hetero.testing.launch`, which also knows the scripts of ``workers`` by name: ``launch("hang.py", 2)``."""

    def run(script_or_module, ranks, args=(), **keywords):
        worker = WORKERS / script_or_module
        return testing.launch(worker if worker.is_file() else script_or_module, ranks, args, **keywords)

    return run


@pytest.fixture(scope="session")
def reliability():
    """What judges the record of an elastic job."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("_reliability")
