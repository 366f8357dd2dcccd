"""Buckets start in the order in which they fill on rank 0, once that is known; those that do not fill are the last."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch_hooks.gradients.order import Order  # noqa: E402


def bucket(name):
    return SimpleNamespace(name=name, parameters=[name])


class Line:
    """Notes what it is told."""

    def __init__(self):
        self.told = []

    def in_order(self, names):
        self.told.append(("next", list(names)))

    def change_order(self, names):
        self.told.append(("rest", list(names)))


class Wire:
    """Brings what rank 0 has sent."""

    def __init__(self, of_rank_0=None):
        self.of_rank_0, self.broadcasts = of_rank_0, 0

    def start_broadcast(self, tensor, name):
        self.broadcasts += 1
        return tensor if self.of_rank_0 is None else torch.tensor(self.of_rank_0)

    def result(self, handle):
        return handle


A, B, C, CARRIER = map(bucket, ["a", "b", "c", "carrier"])
LAYOUTS = SimpleNamespace(known_rows=lambda parameter: parameter == "c")
C_ROWS = ["c.indices", "c.values"]


def order(wire, line, carrier=CARRIER):
    arrangement = SimpleNamespace(buckets=[A, B, C, CARRIER], carrier=carrier)
    return Order(wire, line, arrangement, LAYOUTS, "order"), arrangement


def test_at_first_it_is_the_arrangements_without_the_carrier():
    line = Line()
    of, arrangement = order(Wire(), line, carrier=None)
    of.renew()
    arrangement.carrier = CARRIER  # chosen in the course of the round
    of.next_round(renewed=True)
    assert line.told == [("rest", ["a", "b", *C_ROWS, "carrier"]), ("next", ["a", "b", *C_ROWS])]


def test_then_it_is_that_in_which_they_fill_on_rank_0():
    wire, line = Wire(), Line()
    of, _ = order(wire, line)
    of.renew()
    of.next_round(renewed=True)
    for bucket in (C, A):
        of.filled(bucket)
    of.next_round(renewed=False)
    assert line.told[-1] == ("next", [*C_ROWS, "a", "b"])
    of.filled(B)
    of.next_round(renewed=False)
    assert line.told[-1] == ("next", [*C_ROWS, "a", "b"])
    assert wire.broadcasts == 1


def test_other_ranks_follow_whatever_fills_there():
    line = Line()
    of, _ = order(Wire(of_rank_0=[1, 2, 0]), line)
    of.renew()
    of.next_round(renewed=True)
    of.filled(A)
    of.next_round(renewed=False)
    assert line.told[-1] == ("next", ["b", *C_ROWS, "a"])


def test_what_filled_before_buckets_were_formed_anew_does_not_count():
    line = Line()
    of, _ = order(Wire(), line)
    of.renew()
    of.filled(B)
    of.next_round(renewed=True)
    of.next_round(renewed=False)
    assert line.told[-1] == ("next", ["a", "b", *C_ROWS])


def test_where_calls_are_found_by_name_nothing_is_sent():
    class ByName(Wire, Line):
        def __init__(self):
            Wire.__init__(self)
            Line.__init__(self)

    wire = ByName()
    of, _ = order(wire, wire)
    of.renew()
    for renewed in (True, False, False):
        of.filled(A)
        of.next_round(renewed=renewed)
    assert wire.broadcasts == 0
