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
    if refused({name: options[name][chosen[name]] for name in options if name in chosen}):
        return None
    left = [name for name in options if name not in chosen]
    if not left:
        return chosen
    name = random.choice(left)
    tried = [chosen | {name: index} for index in range(len(options[name]))]
    met = [sum(group in wanted for group in _groups(case, options, strength, name)) for case in tried]
    for index in sorted(range(len(tried)), key=lambda i: (-met[i], random.random())):
        if (case := _complete(tried[index], options, strength, refused, wanted, random)) is not None:
            return case
    return None


def _groups(
    chosen: _Chosen, options: dict[str, list[Any]], strength: int, holding: str | None = None
) -> Iterator[_Group]:
    there = [name for name in options if name in chosen]
    for names in combinations(there, strength):
        if holding is None or holding in names:
            yield tuple((name, chosen[name]) for name in names)
