"""The pace of a rank of the demo that is slow on purpose: by processor time, less what it waited for its core."""

from itertools import accumulate

import pytest
from script_modules import load

from hvd_hetero.testing import ProportionalSleep

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")


@pytest.fixture(scope="module")
def demo_rank():
    return load("demo_rank", "examples")


@pytest.fixture
def slept(demo_rank, monkeypatch):
    """Runs steps given as seconds ((wall, busy) of the forward pass, of the backward pass); returns each sleep."""

    def run(factor, steps):
        now, sleeps = [0.0], []

        def sleep(seconds):
            now[0] += seconds
            sleeps.append(seconds)

        passes = [each for step in steps for each in step]
        times = accumulate(
            (pair for wall, busy in passes for pair in ((0.0, 0.0), (wall, busy))),
            lambda a, b: (a[0] + b[0], a[1] + b[1]),
        )
        monkeypatch.setattr(demo_rank.Pace, "_now", staticmethod(lambda: next(times)))
        pace = demo_rank.Pace(ProportionalSleep(factor, clock=lambda: now[0], sleep=sleep))
        model, x, y = torch.nn.Linear(2, 3), torch.ones(4, 2), torch.tensor([0, 1, 2, 0])
        of_steps = []
        for _ in steps:
            before = len(sleeps)
            pace.gradient(model, x, y)
            of_steps.append(sum(sleeps[before:]))
        return of_steps

    return run


def test_a_rank_with_a_core_of_its_own_takes_its_factor_times_as_long(slept):
    steps = [((1.0, 1.0), (2.0, 2.0))] * 4
    # The first backward pass has no price yet, and is paid for with the second step.
    assert slept(3.0, steps) == pytest.approx([2.0, 10.0, 6.0, 6.0])


def test_waiting_for_a_shared_core_counts_as_slowness(slept):
    steps = [((1.5, 1.0), (2.5, 2.0))] * 50  # 3 s of work and 1 s of waiting in each
    total_s = sum(slept(2.0, steps)) + 4.0 * len(steps)
    assert total_s == pytest.approx(2.0 * 3.0 * len(steps), rel=0.01)
