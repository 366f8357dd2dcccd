"""The division of gradients into buckets, so that the sum over the ranks hides behind the backward pass.

A gradient that leaves by itself costs a call and turns of the wire's threads, which may share a core with training.
Hundreds of small ones make some per cent of a step. A gradient in a bucket waits for the bucket's last one, and is
copied to lie beside the others, in Keras also back. So small gradients share buckets, and large ones go alone.

Let gradients arise in the order 0 … n-1, b_i bytes each. When i arises, R_i = b_i + … + b_{n-1} is still to come.

- b_i >= ``ALONE_FROM_BYTES``: a separate bucket;
- any other joins the open bucket of its kind, or opens one as its first member i. A bucket holds at most
  ``BUCKET_GRADIENTS`` gradients and at most ``min(BUCKET_BYTES, R_i / 2)`` bytes (a single gradient may be larger).
  But if ``R_i < ALONE_FROM_BYTES``, it may hold all of R_i.

One pass, O(n).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# With more, the cost of a call no longer shows.
BUCKET_GRADIENTS = 32
# More buckets mean more turns of Horovod's thread; fewer, less overlap. Between 2 and 4 MiB no difference was found,
# 1 MiB was slower by some per cent, on two ranks with a core each.
BUCKET_BYTES = 2**22
# From here on, copies are assumed to cost more than a collective. On two ranks with a core each, going alone gained 3 %
# of a step at 4 MiB and lost 2 % at 256 KiB, when Horovod made two copies of a bucket. The break-even between these
# sizes, and with the one copy of today, was not measured.
ALONE_FROM_BYTES = 2**20


def divide(sizes: Sequence[int], kinds: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Return the buckets of gradients, which are given by their bytes in the order in which they are likely to arise.

    Gradients of different ``kinds`` (data type, device) never share one.
    Buckets hold the gradients' numbers, each once, and are ordered by their last member: the last bucket holds the
    last gradient.
    """
    # By sizes and kinds alone, which all ranks share, and not by what arises first on one: all need the same buckets.
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}  # by kind, with the bytes that it has room for
    left = sum(sizes)
    for number, size in enumerate(sizes):
        kind = None if kinds is None else kinds[number]
        if size >= ALONE_FROM_BYTES:
            buckets.append([number])
        else:
            bucket, room = open_buckets.get(kind, ([], -1))
            if size > room or len(bucket) == BUCKET_GRADIENTS:
                # Less and less towards the end, since nothing hides the transfer of the last bucket. A remainder that
                # could go alone is not divided: a turn of Horovod's thread takes some tenths of a millisecond.
                bucket, room = [], left if left < ALONE_FROM_BYTES else min(BUCKET_BYTES, left // 2)
                buckets.append(bucket)
            bucket.append(number)
            open_buckets[kind] = bucket, room - size
        left -= size
    return sorted(buckets, key=lambda bucket: bucket[-1])
