"""The gate of sizes: what grows is found, and needs a reason."""

import ast
import copy
import json

import pytest
from script_modules import load

gate = load("size", "scripts/gates")


@pytest.fixture(scope="module")
def code():
    return gate.measured()


def in_limits(code):
    return copy.deepcopy(code) | {"reasons": []}


def test_code_at_its_limits_passes(code):
    assert gate.problems(code, in_limits(code)) == []
    assert code["package"] == [sum(column) for column in zip(*code["rooms"].values(), strict=True)]


@pytest.mark.parametrize(("kind", "slack"), [("rooms", (0, 0)), ("yard", (gate.SLACK_LINES, gate.SLACK_CHARACTERS))])
@pytest.mark.parametrize("unit", [0, 1])
def test_a_line_or_a_character_too_many_is_found(code, kind, slack, unit):
    for name in code[kind]:
        limits = in_limits(code)
        limits[kind][name][unit] -= slack[unit]
        assert gate.problems(code, limits) == []
        limits[kind][name][unit] -= 1
        (said,) = gate.problems(code, limits)
        assert said.startswith(f"{name} has ")


def test_a_room_may_grow_by_what_another_loses_and_a_sum_for_a_reason(code, tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "LIMITS", tmp_path / "size.json")
    limits = in_limits(code)
    limits["rooms"]["torch_hooks"][0] -= 7
    limits["rooms"]["hvd_hetero.data"][0] += 7
    assert gate.problems(code, limits)
    assert gate.write(code, limits, None) == 0
    assert gate.problems(code, json.loads(gate.LIMITS.read_text())) == []
    limits["package"][0] -= 7
    gate.LIMITS.unlink()
    assert gate.write(code, limits, None) == 1
    assert not gate.LIMITS.exists()
    assert gate.write(code, limits, "a reason") == 0
    assert json.loads(gate.LIMITS.read_text())["reasons"] == [{"why": "a reason", "grown": {"package": [7, 0]}}]


def test_attributes_and_what_is_passed_on_are_counted():
    tree = ast.parse(
        """
class Holder:
    def __init__(self):
        self.a, self.b = 1, 2
        self.b += 1
        self.inner.set = 3

    def one(self):
        \"\"\"Return it.\"\"\"
        return self.inner.one

    def two(self, x):
        self.inner.two(x)

    def more(self):
        return self.inner.one + 1

@dataclass
class State:
    x: int
    y: int = 0

@dataclass(frozen=True)
class Record:
    x: int
"""
    )
    holder, state, record = tree.body
    assert [gate.attributes(each) for each in (holder, state, record)] == [2, 2, 0]
    assert [gate.passed_on(each) for each in holder.body] == [None, "inner", "inner", None]


def test_a_class_that_takes_one_more_attribute_is_found(code):
    assert gate.problems(code | {"attributes": {"a.Class": 16}}, in_limits(code)) == [
        "a.Class has 16 attributes, its limit is 15: part it, so that each part uses its own"
    ]
    limits = in_limits(code) | {"attributes": {"a.Class": 17}}
    assert gate.problems(code | {"attributes": {"a.Class": 17}}, limits) == []
    assert len(gate.problems(code | {"attributes": {"a.Class": 18}}, limits)) == 1
