"""Where a rank is, read from its stack on request, so that training pays nothing."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

_OURS = ("hvd_hetero", "torch_hooks", "keras_callbacks")
_LIBRARIES = frozenset({*_OURS, "horovod", "torch", "tensorflow", "keras", "tf_keras", *sys.stdlib_module_names})
_COLLECTIVES = {"horovod": "hvd", "torch.distributed": "dist"}  # and the names that users know them by
_WRAPS = "torch.distributed.c10d_logger"  # functions of torch.distributed, each wrapped in another function
_RUNS_PROGRAMS = frozenset({"elastic", "runner", "spark", "ray"})  # parts of Horovod that call the user's program
_one_at_a_time = threading.Lock()


class Whereabouts(NamedTuple):
    """One rank's answer to where it is."""

    rank: int
    round: int
    """Finished rounds of the current training."""
    stage: str
    """The stage of the current training: ranks that wait at different stages are in different collectives."""
    waits: bool
    """True if the rank waits in a collective."""
    where: str
    """Line of the user's program, for people."""
    for_s: float
    """Seconds here without progress."""

    def encode(self) -> bytes:
        """Return it as one short packet."""
        # So many characters of a line fit into one packet (arbitrary).
        return json.dumps(self._replace(where=self.where[:200])).encode()

    @classmethod
    def decode(cls, packet: bytes) -> Whereabouts:
        """Return a packet's content; the channel has dropped those of others."""
        return cls(*json.loads(packet))


class Position(NamedTuple):
    """The position of a thread in the program."""

    waits: bool
    """True if the thread is in a module that waits for other ranks."""
    of_its_own: bool
    """True if the user's program called a collective itself, and this project did not."""
    where: str
    """Line of the user's program, for people."""


def locate(thread: int, waits_in: Sequence[str]) -> Position:
    """Return where a thread is now, keeping no frame. ``waits_in`` holds beginnings of modules' names.

    The user's program is the innermost code that is no package's. If there is none, it may be a package itself: the
    innermost one that is neither a framework nor this project.
    """
    frame = _frame_of(thread)
    waits = False
    call = ""
    innermost = outermost = package = None
    try:
        while frame is not None:
            module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
            root, *parts = module.split(".")
            waits |= module.startswith(tuple(waits_in)) and _RUNS_PROGRAMS.isdisjoint(parts)
            if not _is_library(root, frame.f_code.co_filename):
                return Position(waits, outermost in _COLLECTIVES.values(), f"{call}{_line(frame)}")
            if package is None and root not in _LIBRARIES:
                package = f"{call}{_line(frame)}"
            innermost = innermost or f"{module}.{name}()"
            # The last one that remains is what the user's program called.
            ours = root if root in _OURS else None
            outermost = next(
                (short for long, short in _COLLECTIVES.items() if f"{module}.".startswith(f"{long}.")), ours
            )
            if outermost and not name.startswith("_") and module != _WRAPS:
                call = f"{outermost}.{name}() at "
            frame = frame.f_back
    finally:
        del frame  # a kept frame would keep its variables alive
    return Position(waits, False, package or innermost or "no line of Python")


def _frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread."""
    # Python 3.11 makes the frames' objects while it holds a lock that each thread needs to begin and to end. If that
    # starts a garbage collection, a finalizer may let other threads run, and one of them wait for the lock without
    # giving up the interpreter: then the process hangs (issue 106883 of CPython). So there no collection begins
    # meanwhile.
    if sys.version_info >= (3, 12):
        return sys._current_frames().get(thread)
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if collects:
                gc.enable()


def _line(frame: FrameType) -> str:
    """Return the line for people: file, number, function."""
    function = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
    inside = "" if function == "<module>" else f", {function}()"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}{inside}"


def _is_library(root: str, file: str) -> bool:
    installed = root in _LIBRARIES or f"{os.sep}site-packages{os.sep}" in file or file.startswith("<")
    return installed and root != "__main__"
