"""What an edit of Horovod's sources is."""

from dataclasses import dataclass

__all__ = ["Edit"]


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the single occurrence of ``old`` in the file ``path`` by ``new``."""

    path: str
    old: str
    new: str
    reason: str
