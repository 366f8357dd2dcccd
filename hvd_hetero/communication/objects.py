"""Objects of ranks in one collective: messages of unequal length, laid end to end.

Rank i sends m_i: a header of the call's name and the length of its pickle, then the pickle. A gather of rows brings
m_0 m_1 ... m_{n-1} to all, and the lengths show where each begins; to broadcast an object, only its rank sends
anything.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from hvd_hetero.errors import HeteroError
from hvd_hetero.rounds import checksum

Gather: TypeAlias = Callable[[str, memoryview], memoryview]
"""A collective of this name that lays the ranks' messages end to end, in order of rank."""
# A checksum of the call's name, and the length. TensorFlow pairs calls of Horovod by their kind and not by their names,
# and here all are of one kind. Without the name, a message of another call would be taken for one of this.
_HEADER = struct.Struct("<IQ")


def all_objects(obj: Any, name: str, ranks: int, gather: Gather) -> Sequence[Any]:
    """Return every rank's object, in order of rank."""
    pickles = _pickles(gather(name, _message(obj, name)), name, ranks)
    return [pickle.loads(each) for each in pickles]


def object_of(obj: Any, is_mine: bool, name: str, gather: Gather) -> Any:
    """Return the object of the one rank for which ``is_mine`` is true; there as it is, elsewhere a copy."""
    # Horovod's own broadcast sends the length first, in another collective, and a collective is a round trip whatever
    # it carries. But a gather is a ring of n - 1 hops and a broadcast a tree: on three ranks this takes half the time,
    # and on many it was not measured.
    (pickled,) = _pickles(gather(name, _message(obj, name) if is_mine else memoryview(b"")), name, 1)
    return obj if is_mine else pickle.loads(pickled)


def _message(obj: Any, name: str) -> memoryview:
    import cloudpickle  # what Horovod installs and uses: functions of the user's script travel, too

    written = io.BytesIO()
    written.seek(_HEADER.size)
    cloudpickle.dump(obj, written)
    length = written.tell() - _HEADER.size
    # Horovod counts bytes in a C int.
    if written.tell() >= 2**31:
        raise ValueError(
            f"an object that a rank sends must be below 2 GiB, got {length / 2**30:.1f} GiB of "
            f"{type(obj).__name__} ({name}); keep large arrays in the model, whose tensors travel one by one"
        )
    message = written.getbuffer()
    _HEADER.pack_into(message, 0, checksum(name.encode()), length)
    return message


def _pickles(messages: memoryview, name: str, expected: int) -> list[memoryview]:
    left, mine, names, found = messages, checksum(name.encode()), set(), []
    while left:
        if len(left) < _HEADER.size:
            names.add(-1)  # of a call that is not ours
            break
        of_call, length = _HEADER.unpack_from(left)
        end = _HEADER.size + length
        names.add(of_call)
        found.append(left[_HEADER.size : end])
        left = left[end:]
    if names != {mine} or len(found) != expected:
        raise HeteroError(
            f"collective {name!r} got {len(found)} of {expected} messages"
            f"{', some of them of another call' if names - {mine} else ''}; make the same calls of Horovod and of "
            "this package in the same order on every rank"
        )
    return found
