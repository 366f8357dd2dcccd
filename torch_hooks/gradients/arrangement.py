"""Which gradients form a bucket, and which bucket carries the table: the same on all ranks.

Which gradients form a bucket is fixed, the last parameters first as the backward pass brings them: buckets must be the
same on all ranks, and ranks may differ in what arises first.

**The carrier.** One bucket has room for the table behind its gradients, and leaves last. So agreeing costs no
separate collective. It is the smallest one, which is copied and held back at the least cost. No bucket can be it if
all are of another type than the table, on another device, compressed, or by rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import torch

from hvd_hetero.communication.bucket_sizes import Limits
from hvd_hetero.errors import RoundStateError
from hvd_hetero.rounds import RoundTable, checksum
from torch_hooks.gradients.buckets import Bucket, Gradient, buckets_of
from torch_hooks.gradients.sparse import Layouts

__all__ = ["Arrangement"]

_trained, _gradient = attrgetter("requires_grad"), attrgetter("grad")


class Arrangement:
    """The buckets of the parameters that are trained. Parameters are the keys of ``names``, in the order of all ranks.

    ``table_type`` is the type of the table's numbers; None if no bucket may carry it. ``limits`` are the wire's.
    """

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        prefix: str,
        layouts: Layouts,
        workers: int,
        table_type: torch.dtype | None,
        limits: Limits,
    ) -> None:
        self.names = names
        self._prefix = prefix
        self._layouts = layouts
        self._table_length = RoundTable.length(workers)
        self._table_type = table_type
        self._limits = limits
        self._gradients: dict[torch.Tensor, Gradient] = {}
        self._pattern = b""  # which parameters are trained, as the buckets are formed
        self._told = b""  # the same by the latest table
        self.buckets: list[Bucket] = []
        """The carrier, if there is one, is the last."""
        self.carrier: Bucket | None = None
        self.extend(names)

    def extend(self, parameters: Iterable[torch.Tensor]) -> None:
        """Train these parameters, too."""
        for parameter in parameters:
            self._gradients[parameter] = Gradient(parameter)

    def of(self, parameter: torch.Tensor) -> Gradient:
        """Return the record of its gradient."""
        return self._gradients[parameter]

    @property
    def gradients(self) -> Iterable[Gradient]:
        """The records of all gradients."""
        return self._gradients.values()

    def present(self) -> list[tuple[Gradient, torch.Tensor]]:
        """Return the gradients that are there, with their records; none has been computed when a round begins."""
        there = zip(self._gradients.values(), map(_gradient, self._gradients), strict=True)
        return [(note, gradient) for note, gradient in there if gradient is not None]

    @property
    def outdated(self) -> bool:
        """True if other parameters are trained now than the buckets hold."""
        return self._now() != self._pattern

    @property
    def told(self) -> bool:
        """True if the latest table has shown other ranks parameters that the buckets do not hold."""
        return self._told != self._pattern

    def tell(self) -> int:
        """Return a checksum of which parameters are trained now, for the table."""
        self._told = self._now()
        return checksum(self._told)

    @property
    def carrier_is_whole(self) -> bool:
        """True if there is a carrier, and all of its parameters are still trained."""
        return self.carrier is not None and all(map(_trained, self.carrier.parameters))

    @property
    def carrier_is_held_back(self) -> bool:
        """True if there is a carrier that is full and has not left."""
        return self.carrier is not None and self.carrier.under_way is None and not self.carrier.waits_for

    def renew(self, weight: float) -> list[Gradient]:
        """Form the buckets again, if what is trained has changed: only by that, so that all ranks do it alike.

        A bucket stays if all of it is still trained. No other bucket has left on a rank that froze before its
        backward pass, because a frozen parameter has no gradient that would fill its bucket. A rank may freeze later
        all of a bucket that has left, because its sum is under way in any case.

        Returns gradients that the user has changed.
        """
        self._layouts.agree()
        self._pattern = self._told
        kept = [b for b in self.buckets if all(map(_trained, b.parameters))]
        altered = [m for b in self.buckets if b not in kept and b.under_way is None for m in b.moved()]
        for gradient in self.gradients:
            if gradient.bucket not in kept:
                gradient.bucket = gradient.slot = None  # its hook stays, and must not fill what is not there any more
        held = {member for bucket in kept for member in bucket.members}
        free = [g for p, g in self._gradients.items() if p.requires_grad and g not in held]
        divided = buckets_of(free[::-1], self._layouts.known_rows, self._limits)
        new = [Bucket(f"{self._prefix}.gradient.{self.names[m[0].parameter]}", m) for m in divided]
        self.require_a_bucket()
        if any(g.sent is not None for g in free):  # the others of its bucket would leave twice
            self._refuse_frozen(g for g in self.gradients if g.sent is not None and not g.parameter.requires_grad)
        self.buckets = kept + new
        # Of the new ones: others may have left already, on this rank or on another.
        self.choose_carrier(new)
        for bucket in new:
            _weigh_anew(bucket, weight)
        return altered

    def choose_carrier(self, among: list[Bucket]) -> None:
        """Make one of these buckets carry the table, unless the present carrier stays."""
        if self.carrier not in self.buckets:
            able = filter(self._can_carry, reversed(among))
            self.carrier = min(able, key=attrgetter("size"), default=None)
            if self.carrier is not None:
                self.carrier.carry(self._table_length)
        if self.carrier is not None:
            self.buckets.remove(self.carrier)
            self.buckets.append(self.carrier)

    def require_a_bucket(self) -> None:
        """Raise if a gradient that has arrived has no bucket to leave with."""
        self._refuse_frozen(g for g in self.gradients if g.bucket is None and g.arrived and g.sent is None)

    def _now(self) -> bytes:
        return bytes(map(_trained, self.names))

    def _can_carry(self, bucket: Bucket) -> bool:
        """Return whether its gradients are of the table's kind."""
        if bucket.dtype != self._table_type:
            return False
        return not any(
            self._layouts.elsewhere(p) or getattr(p, "grad_dtype", p.dtype) != p.dtype or self._layouts.known_rows(p)
            for p in bucket.parameters
        )

    def _refuse_frozen(self, gradients: Iterable[Gradient]) -> None:
        for gradient in gradients:
            raise RoundStateError(
                f"{self.names[gradient.parameter]!r} was frozen between backward() and step(), while its gradient "
                "waited to be summed; call requires_grad_(False) before backward() or after step()"
            )


def _weigh_anew(bucket: Bucket, weight: float) -> None:
    """Weigh again what was weighed on its arrival: it has another slot now."""
    bucket.open()
    for member in bucket.members:
        if not member.weighed:
            continue
        if member.changed:  # refused once it is sent
            member.weighed = False
            continue
        member.note(bucket.take(member, weight))
