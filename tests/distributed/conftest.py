"""Every test in here starts processes that wait for one another, so every test has a time limit, and keeps it."""

import faulthandler
import importlib
import importlib.util
import os
import resource
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import NamedTuple

import pytest
from pool import Pool
from support.preload import Preloaded

from hvd_hetero import testing

pytest.register_assert_rewrite("elastic_jobs")  # which judges for two files of tests
WORKERS = Path(__file__).parent / "workers"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LAUNCHES: list[tuple[float, str]] = []


class Framework(NamedTuple):
    """What its ranks import, what is in the environment meanwhile, and what is so in ranks alone."""

    modules: tuple[str, ...]
    env: dict[str, str]
    env_of_ranks: Mapping[str, str] = MappingProxyType({})


# Ranks outnumber processors here. Each asks all others for news once in so many ms (Horovod's default: 1), also while
# they compute: at 1 ms instead of 5 Keras's tests took a sixth more of the processors.
CYCLE = "HOROVOD_CYCLE_TIME"
# And PyTorch's ranks would spin while they wait: two fifths of what test_torch_conformance took of the processors. One
# that looks every 0.2 ms takes 9 % of a processor, every ms 2.5 %.
WAIT = "HOROVOD_WAIT_SLEEP_US"
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", CYCLE: "5",
}  # fmt: skip
LAUNCHER = "horovod.runner.launch"  # horovodrun's, which is forked, too: another fifth of a second for each launch
# The first optimizer that a process makes imports torch._dynamo: two seconds of a processor for each rank. And the
# examples learn scikit-learn's digits: another one.
TORCH = ("horovod.torch", "torch_hooks", "torch._dynamo", "sklearn.datasets", LAUNCHER), {
    CYCLE: "2", WAIT: "1000",
    # Memory from malloc in pages of 2 MiB halves what a fork takes: of ranks, and of ranks into workers of loaders. It
    # gains nothing with TensorFlow, whose ranks fork nothing.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}  # fmt: skip
TORCH_ALONE = "PyTorch alone"  # a rank that torchrun starts again looks at its store when it imports torch_hooks
OF_TENSORFLOW = "tests.distributed.workers.without_stacks", "tests.distributed.workers.plain_graphs"
FRAMEWORKS = {
    "torch": Framework(*TORCH),
    "torch.distributed": Framework(*TORCH, {"HVD_HETERO_TEST_WIRE": "torch.distributed"}),
    TORCH_ALONE: Framework(("torch", "torch._dynamo", "sklearn.datasets", "torch.distributed.run"), TORCH[1]),
    "Keras 3": Framework(
        ("horovod.tensorflow", "keras_callbacks", "sklearn.datasets", *OF_TENSORFLOW, LAUNCHER),
        {"TF_USE_LEGACY_KERAS": "0", **QUIET},
    ),
    "tf_keras": Framework(  # one test asks for Horovod's own optimizer
        ("horovod.tensorflow", "horovod.tensorflow.keras", "keras_callbacks", *OF_TENSORFLOW, LAUNCHER),
        {"TF_USE_LEGACY_KERAS": "1", **QUIET},
    ),
}
HAVE_HOROVOD = importlib.util.find_spec("horovod") is not None
ON_DEVICE = os.environ.get("HVD_HETERO_TEST_DEVICE", "cpu") != "cpu"  # which cannot be used in a fork
# Above that of each launch (limits.py), which says more. Another one by @pytest.mark.distributed(timeout_s=...).
TIMEOUT_S = 600.0
# Later than the limit, for a main thread in C code that never comes back to run the handler of the limit.
LAST_RESORT_S = 30.0


def pytest_collection_modifyitems(items):
    """Let tests of a module that ask the same job for cases run one after the other."""
    modules = list(dict.fromkeys(item.path for item in items))

    def place(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return modules.index(item.path), params.get("outcomes", "")

    items.sort(key=place)


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


@pytest.fixture(scope="session")
def preloaded():
    """What ranks of a framework are forked from; each is made when a test first needs it."""
    made, one_at_a_time = {}, Lock()
    with ExitStack() as stack:

        def of(framework):
            modules, env, _ = FRAMEWORKS[framework]
            alike = modules, frozenset(env.items())
            with one_at_a_time:
                if alike not in made:
                    made[alike] = stack.enter_context(Preloaded(*modules, env=env))
            return made[alike]

        yield of


@pytest.fixture(scope="session")
def launch(preloaded):
    """`hvd_hetero.testing.launch`, which also knows the scripts of ``workers`` by name: ``launch("hang.py", 2)``.

    With a ``framework`` ranks begin with it imported.
    """

    def run(script_or_module, ranks, args=(), *, framework=None, env=None, **keywords):
        worker = WORKERS / script_or_module
        env = {"PYTHONPATH": str(WORKERS.parent), **(env or {})}  # for pool.py
        if framework is not None:
            env = {**FRAMEWORKS[framework].env, **FRAMEWORKS[framework].env_of_ranks, **env}
            if HAVE_HOROVOD and not ON_DEVICE:
                env |= preloaded(framework).variables
            elif not HAVE_HOROVOD and "starter" not in keywords:  # a machine that has but PyTorch
                keywords["starter"] = testing.torchrun(ranks)
        begin_s = time.monotonic()
        try:
            return testing.launch(worker if worker.is_file() else script_or_module, ranks, args, env=env, **keywords)
        finally:
            LAUNCHES.append((time.monotonic() - begin_s, f"{Path(script_or_module).name}, {ranks} ranks, {framework}"))

    return run


@pytest.fixture(scope="module")
def pool(launch):
    """A job that takes cases: ``with pool("exactness.py", 3, "torch") as ranks: ranks[0]["bsp"]``."""
    made = set()

    def make(worker, ranks, framework, args=(), **options):
        job = worker, ranks, framework, *map(str, args)
        assert job not in made, (
            f"{worker} on {ranks} ranks is to be launched again, for tests that would share a job if they ran one "
            "after the other: name its fixture in a parametrize of its own, with indirect=True"
        )
        made.add(job)
        return Pool(launch, worker, ranks, args, framework=framework, **options)

    return make


def pytest_terminal_summary(terminalreporter):
    used, took_s = resource.getrusage(resource.RUSAGE_CHILDREN), sum(each for each, _ in LAUNCHES)
    terminalreporter.write_line(
        f"{len(LAUNCHES)} launches that took {took_s:.0f} s together, some side by side; "
        f"{used.ru_utime + used.ru_stime:.0f} s of processor time in all"
    )
    if terminalreporter.config.option.durations is not None:
        for took_s, what in sorted(LAUNCHES, reverse=True):
            terminalreporter.write_line(f"{took_s:7.1f} s  {what}")


@pytest.fixture(scope="session")
def reliability():
    """What judges the record of an elastic job."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("_reliability")
