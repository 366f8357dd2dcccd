"""Few cases in which every pair (or triple) of options meets."""

from collections.abc import Callable, Iterator
from itertools import combinations, product
from random import Random
from typing import Any, TypeAlias

_Chosen: TypeAlias = dict[str, int]  # of some options, the place of a value
_Group: TypeAlias = tuple[tuple[str, int], ...]


def covering(
    options: dict[str, list[Any]],
    strength: int = 2,
    refused: Callable[[dict[str, Any]], Any] = lambda case: False,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Choose cases that hold every `strength` values of different options together at least once.

    `refused` is also asked of parts of a case (so use `case.get`), and what it refused stays so whatever comes to it.
    Values that no case can hold together are left out.
    """
    random = Random(seed)
    wanted = {
        tuple(zip(names, values, strict=True))
        for names in combinations(options, strength)
        for values in product(*(range(len(options[name])) for name in names))
    }
    cases = []
    for first in sorted(wanted):
        if first not in wanted:
            continue
        if (chosen := _complete(dict(first), options, strength, refused, wanted, random)) is not None:
            wanted.difference_update(_groups(chosen, options, strength))
            cases.append({name: options[name][chosen[name]] for name in options})
    return cases


def _complete(
    chosen: _Chosen,
    options: dict[str, list[Any]],
    strength: int,
    refused: Callable[[dict[str, Any]], Any],
    wanted: set[_Group],
    random: Random,
) -> _Chosen | None:
    """Fill the rest, each option with the value that meets most of what is wanted; go back where all are refused."""

    def allows(case: _Chosen) -> bool:
        return not refused({name: options[name][case[name]] for name in options if name in case})

    if not allows(chosen):
        return None
    left = {name: [chosen | {name: i} for i in range(len(options[name]))] for name in options if name not in chosen}
    if not left:
        return chosen
    left = {name: list(filter(allows, tried)) for name, tried in left.items()}
    if not all(left.values()):
        return None  # now, and not after all that could be tried for the others
    forced = [name for name, tried in left.items() if len(tried) == 1]
    name = random.choice(forced or list(left))
    met = [sum(group in wanted for group in _groups(case, options, strength, name)) for case in left[name]]
    for index in sorted(range(len(met)), key=lambda i: (-met[i], random.random())):
        if (case := _complete(left[name][index], options, strength, refused, wanted, random)) is not None:
            return case
    return None


def _groups(
    chosen: _Chosen, options: dict[str, list[Any]], strength: int, holding: str | None = None
) -> Iterator[_Group]:
    there = [name for name in options if name in chosen]
    for names in combinations(there, strength):
        if holding is None or holding in names:
            yield tuple((name, chosen[name]) for name in names)
