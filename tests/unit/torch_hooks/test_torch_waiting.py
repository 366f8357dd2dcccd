"""Waiting for a collective: asleep while others compute, awake while the data moves."""

import math
from types import SimpleNamespace

import pytest

import torch_hooks.wires.waiting as waiting

YIELD_S, LOOK_S = 10e-6, 1e-6


class World:
    """A collective that ends at a given second, and a clock that sleeping and yielding move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends_s: float, told: str = "") -> None:
        self.now_s, self.ends_s = 100.0, 100.0 + ends_s
        self.slept: list[tuple[float, float]] = []
        monkeypatch.setattr(waiting, "time", SimpleNamespace(perf_counter=lambda: self.now_s, sleep=self.sleep))
        environ = {"HOROVOD_WAIT_SLEEP_US": told}
        monkeypatch.setattr(waiting, "os", SimpleNamespace(sched_yield=self.give_way, environ=environ))
        monkeypatch.setattr(waiting, "_pause_s", waiting._pause_s.__wrapped__)  # without what it has read before

    def ended(self) -> bool:
        self.now_s += LOOK_S
        return self.now_s >= self.ends_s

    def sleep(self, seconds: float) -> None:
        self.slept.append((self.now_s - 100.0, seconds))
        self.now_s += seconds

    def give_way(self) -> None:
        self.now_s += YIELD_S

    def asleep(self, from_s: float, to_s: float) -> float:
        """The share of a stretch of time that was slept through."""
        return sum(s for at, s in self.slept if from_s <= at < to_s) / (to_s - from_s)


@pytest.mark.parametrize("ends_s", [0.02, 0.1, 0.3])
def test_it_ends_soon_after_the_collective(monkeypatch, ends_s):
    world = World(monkeypatch, ends_s)
    waiting.wait(world.ended, 0.1, 0.005)
    assert ends_s <= world.now_s - 100.0 <= ends_s + 0.6e-3


def test_awake_it_yields_much_more_often_than_it_looks(monkeypatch):
    world = World(monkeypatch, 0.01)
    looks = []
    waiting.wait(lambda: looks.append(world.now_s) or world.ended(), 0.01, 0.01)
    assert 0.5 * 0.01 / (8 * YIELD_S) < len(looks) < 2 * 0.01 / (8 * YIELD_S)


def test_it_is_awake_at_the_beginning_and_about_the_expected_end_and_sleeps_in_between(monkeypatch):
    world = World(monkeypatch, 0.3)
    waiting.wait(world.ended, 0.1, 0.005)
    assert world.asleep(0.0, 0.01) == 0.0  # it may be the last to come: nothing but the transfer is left
    assert world.asleep(0.0105, 0.0895) > 0.98
    assert world.asleep(0.0905, 0.1095) == 0.0
    assert world.asleep(0.1105, 0.3) > 0.98  # who is expected has not come


def test_it_wakes_when_the_end_is_imminent_and_sleeps_again_when_it_does_not_come(monkeypatch):
    world = World(monkeypatch, 0.6)
    waiting.wait(world.ended, math.nan, 0.005, lambda: world.now_s >= 100.25)
    assert world.asleep(0.0105, 0.25) > 0.98
    assert world.asleep(0.251, 0.27) == 0.0
    assert world.asleep(0.272, 0.6) > 0.98


@pytest.mark.parametrize(("told", "slept_s"), [("200", 200e-6), ("5000", 5e-3)])
def test_told_how_long_to_sleep_it_does_nothing_else_also_where_the_data_moves(monkeypatch, told, slept_s):
    world = World(monkeypatch, 0.02, told)
    waiting.wait(world.ended, 0.01, 0.01)
    assert [seconds for _, seconds in world.slept] == pytest.approx([slept_s] * len(world.slept))
    assert world.asleep(0.0, 0.02) > 0.98
