"""Who is connected to whom: a circulant graph, in which every rank passes on what it hears.

Ranks stand in a circle of n; rank i is connected to i ± 2^k (mod n) for every 2^k ≤ n/2, and up to `MESH` ranks
simply to all. A signal is flooded: whoever hears something new tells all neighbours that may not know it yet.

    connections per rank     at most 2·log2(n)        18 at n = 1,000     22 at n = 4,000
    hops to the farthest     about log2(n) / 2         6 at n = 1,000      7 at n = 4,000
    messages per signal      at most two per connection

No rank is special, so no rank's death matters more than another's. The graph stays connected under any loss of fewer
ranks than each has neighbours (the tests try random tenths of the ranks as well), and the hops hardly grow.

Rejected: the full mesh, whose n(n - 1)/2 connections are half a million at n = 1,000; a k-ary or binomial tree, in
which the death of an inner rank cuts its subtree off until somebody notices and the tree is mended, and a star through
relays, the same with fewer and busier victims: both need failure detection for what redundancy gives for nothing.
"""

from __future__ import annotations

__all__ = ["MESH", "neighbours"]

MESH = 8
"""Up to here everybody is connected to everybody: one hop on one machine with the usual number of devices."""


def neighbours(rank: int, size: int) -> frozenset[int]:
    """The ranks that ``rank`` is connected to; symmetric."""
    if size <= MESH:
        return frozenset(range(size)) - {rank}
    jumps = [1 << k for k in range((size // 2).bit_length())]
    return frozenset((rank + signed) % size for jump in jumps for signed in (jump, -jump))
