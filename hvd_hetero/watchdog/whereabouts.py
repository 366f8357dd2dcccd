"""Where a rank is: read from its stack when somebody asks, so that training itself pays nothing for it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from types import FrameType
from typing import NamedTuple

__all__ = ["Place", "Whereabouts", "locate"]

_OURS = ("hvd_hetero", "torch_hooks", "keras_callbacks")
_LIBRARIES = frozenset({*_OURS, "horovod", "torch", "tensorflow", "keras", "tf_keras", *sys.stdlib_module_names})
_LONGEST = 200  # characters of a place in a program, so that an answer fits into one packet (arbitrary)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What one rank says of itself."""

    rank: int
    round: int
    """rounds that it has finished, in the training at hand"""
    place: str
    """in the training at hand: ranks in different places are in different collectives, if they wait"""
    waits: bool
    """whether it waits in a collective"""
    where: str
    """the same for people"""
    for_s: float
    """seconds that it has been there without having got on"""

    def encode(self) -> bytes:
        """As one short packet."""
        return json.dumps({**asdict(self), "where": self.where[:_LONGEST]}).encode()

    @classmethod
    def decode(cls, packet: bytes) -> Whereabouts | None:
        """None for what no rank of this version sends."""
        try:
            values = json.loads(packet)
        except ValueError:
            return None
        kinds = {"rank": int, "round": int, "place": str, "waits": bool, "where": str, "for_s": float}
        assert set(kinds) == {field.name for field in fields(cls)}
        if not isinstance(values, dict) or {name: type(value) for name, value in values.items()} != kinds:
            return None
        return cls(**values)


class Place(NamedTuple):
    """Where a thread is."""

    waits: bool
    """whether in one of the modules in which it waits for other ranks"""
    of_its_own: bool
    """whether the user's program has called Horovod itself"""
    where: str
    """in the user's program, for people"""


def locate(thread: int, waits_in: Sequence[str]) -> Place:
    """Where a thread is now. ``waits_in`` are beginnings of modules' names. No frame is kept."""
    frame: FrameType | None = sys._current_frames().get(thread)
    waits = False
    call = ""
    innermost = outermost = None
    try:
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            if module.startswith(tuple(waits_in)):
                waits = True
            if not _is_library(module, frame.f_code.co_filename):
                at = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                function = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
                inside = "" if function == "<module>" else f", {function}()"
                return Place(waits, outermost == "horovod", f"{call}{at}{inside}")
            innermost = innermost or f"{module}.{frame.f_code.co_name}()"
            # The last one that is left is what the user's program has called.
            outermost = root = module.partition(".")[0]
            if root == "horovod" or root in _OURS:
                name = frame.f_code.co_name
                call = f"{'hvd' if root == 'horovod' else root}.{name}() at " if not name.startswith("_") else call
            frame = frame.f_back
    finally:
        del frame  # or it would keep what it holds
    return Place(waits, False, innermost or "no place in Python")


def _is_library(module: str, file: str) -> bool:
    root = module.partition(".")[0]
    if root == "__main__":
        return False
    return root in _LIBRARIES or f"{os.sep}site-packages{os.sep}" in file or file.startswith("<")
