"""Objects of ranks in one collective: messages of unequal length, laid end to end.

Rank i sends m_i, the length of its pickle in eight bytes and the pickle. A gather of rows brings m_0 m_1 ... m_{n-1} to
all, and the lengths in it tell where each begins; to broadcast an object, only its rank sends anything. Horovod's own
functions exchange lengths first, in a collective of their own, and a collective is a round trip whatever it carries.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

__all__ = ["Gather", "all_objects", "object_of"]

Gather: TypeAlias = Callable[[bytes], bytes | memoryview]
"""A collective that lays what the ranks send end to end, in order of rank."""
_LENGTH = 8


def all_objects(obj: Any, gather: Gather) -> Sequence[Any]:
    """Return every rank's object, in order of rank."""
    return _read(gather(_message(obj)))


def object_of(obj: Any, is_mine: bool, gather: Gather) -> Any:
    """Return the object of the one rank that says that it is its own; there as it is, elsewhere a copy."""
    (found,) = _read(gather(_message(obj) if is_mine else b""))
    return obj if is_mine else found


def _message(obj: Any) -> bytes:
    import cloudpickle  # what Horovod installs and uses: functions of the user's script travel, too

    pickled: bytes = cloudpickle.dumps(obj)
    return len(pickled).to_bytes(_LENGTH, "little") + pickled


def _read(messages: bytes | memoryview) -> list[Any]:
    left, found = memoryview(messages), []
    while left:
        end = _LENGTH + int.from_bytes(left[:_LENGTH], "little")
        found.append(pickle.loads(left[_LENGTH:end]))
        left = left[end:]
    return found
