"""The project's own exceptions. Mistakes in arguments are ``ValueError`` and ``TypeError``, as everywhere in Python."""


class HeteroError(Exception):
    """Something went wrong in a running job; the message says what, and what to do."""


class PlanMismatchError(HeteroError):
    """The ranks hold different plans or different data. Going on would corrupt training, so all ranks stop."""


class RoundStateError(HeteroError):
    """A call came at a point of the round where it has no meaning."""


class PeerLostError(HeteroError):
    """Another rank has failed, has returned, or does not come in time: this one would wait for it for ever."""
