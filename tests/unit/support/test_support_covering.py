from itertools import combinations, product

import pytest

from tests.support.covering import covering

OPTIONS = {"a": [1, 2, 3], "b": ["x", "y"], "c": [None, [1]], "d": list(range(4)), "e": [True, False]}


def refused(case):
    return (case.get("a"), case.get("b")) == (1, "x") or (case.get("d"), case.get("e")) == (3, True)


@pytest.mark.parametrize("strength", [2, 3])
def test_every_group_of_values_is_in_a_case_that_is_not_refused(strength):
    cases = covering(OPTIONS, strength, refused, seed=3)
    possible = [dict(zip(OPTIONS, values, strict=True)) for values in product(*OPTIONS.values())]
    possible = [case for case in possible if not refused(case)]
    for names in combinations(OPTIONS, strength):
        assert {str([case[name] for name in names]) for case in cases} == {
            str([case[name] for name in names]) for case in possible
        }
    assert all(list(case) == list(OPTIONS) and not refused(case) for case in cases)
    assert len(cases) < len(possible) / 2
    assert cases == covering(OPTIONS, strength, refused, seed=3)
