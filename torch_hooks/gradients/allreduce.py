"""The allreduce that most policies use: gradients leave in buckets, as the backward pass fills them.

A call into Horovod costs Python several microseconds, and so does every look into a dictionary by tensor, whose hash is
a function of Python. With hundreds of tensors that is a hundredth of a step, or more. So gradients are gathered in
buckets (``communication.buckets``), each of which is one tensor to Horovod (``gradients.places``), one call and one
wait; what is known of a gradient is found once, when its hook is made.

Which gradients form a bucket is fixed, the last parameters first as the backward pass brings them: buckets must be the
same on all ranks, and ranks may differ in what arises first.

**The carrier.** One bucket has room for the table behind its gradients, and leaves last. So agreeing costs no
collective of its own. It is the smallest one, which is copied and held back at the least cost. In a round that begins
to train other parameters, the ranks must agree on these before a bucket is formed anew. The table then travels with the
former carrier, whose gradients are zeros if they will leave with other buckets. The table travels by itself in the very
first round, and where no bucket is like it: all are of another type, on another device, compressed, or by rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch

from hvd_hetero.balancer import Balancer
from hvd_hetero.errors import RoundStateError
from hvd_hetero.rounds import RoundTable, checksum
from torch_hooks.gradients.buckets import Bucket, Dense, Gradient, buckets_of, flat
from torch_hooks.gradients.compression import Compressed
from torch_hooks.gradients.sparse import Gather, Layouts
from torch_hooks.gradients.synchroniser import Synchroniser
from torch_hooks.parameters.parameter_norm import ParameterNorm
from torch_hooks.wires.choice import TorchWire

__all__ = ["Allreduce"]

_TRAINED = attrgetter("requires_grad")
_CHANGED = (
    "was changed between backward() and step(), while it was on its way to the other ranks. Clip or unscale in "
    "optimizer.register_step_pre_hook(…), or write: if optimizer.synchronize(): clip; with "
    "optimizer.skip_synchronize(): optimizer.step()"
)


class Allreduce(Synchroniser):
    """The mean gradient over all samples of the round, on every rank.

    In the last backward pass every bucket goes on the wire as soon as it is full, with its weight already applied:
    factors handed to Horovod would have to be equal on all ranks. (Where the first batch of a rank had several passes,
    as in scripts that do not add their losses, its buckets leave at ``step()``.) Every large gradient is gone through
    once: on its way to its bucket's memory, or where it leaves alone. (Where all weights are equal, Horovod could
    divide, which is the same work in its thread; but what is averaged and what is summed would be two collectives.)

    ``compression`` is Horovod's (``compress`` and ``decompress``), applied to weighted gradients; the table is never
    compressed. Sparse gradients travel as rows (``torch_hooks.gradients.sparse``), unless ``sparse_as_dense``.
    """

    def __init__(
        self,
        balancer: Balancer,
        optimizer: torch.optim.Optimizer,
        names: dict[torch.Tensor, str],
        prefix: str,
        wire: TorchWire,
        *,
        compression: Any = None,
        sparse_as_dense: bool = False,
    ) -> None:
        super().__init__(balancer, optimizer, names, prefix, wire)
        self._sketch: ParameterNorm = ParameterNorm(names)
        self._gradients = {p: Gradient(p) for p in names}
        self._compression = compression
        self._layouts = Layouts(names, prefix, optimizer, wire, as_dense=sparse_as_dense)
        self._pattern = b""  # which parameters are trained, as the buckets are formed
        self._told = b""  # and as the latest table says
        self._buckets: list[Bucket] = []
        """the carrier, if there is one, being the last"""
        self._carrier: Bucket | None = None
        self._under_way: list[Bucket] = []
        self._expected = 0
        """buckets that fill by themselves"""
        self._filled = -1  # so many did in the last round
        self._aside: list[Gradient] = []
        """of a micro-batch that failed after they had left"""
        self._some_arrived = False
        self._some_wait = False
        """for a bucket"""
        self._altered: list[Gradient] = []
        """by somebody else, between their arrival and that of the last one of their bucket"""
        self._first_batch = True
        """whether none had data before: it shows how gradients come, and whether the loop changes them"""
        self._at_the_end = True
        """whether nothing leaves before ``finish``: in the first batch, and if that had several backward passes"""
        self._several_passes = False

    @property
    def under_way(self) -> bool:
        """Whether gradients are on their way, or wait for others to leave with."""
        return self._some_arrived or bool(self._under_way) or self._table is not None

    @property
    def gradients_left(self) -> bool:
        """Whether something cannot be taken back."""
        return bool(self._under_way) or self._table is not None

    def note_of(self, parameter: torch.Tensor) -> Gradient:
        """The record of its gradient."""
        return self._gradients[parameter]

    def extend(self, parameters: Iterable[torch.Tensor]) -> None:
        """These are trained, too."""
        for parameter in parameters:
            self._gradients[parameter] = Gradient(parameter)
        self._layouts.extend(parameters)
        self._sketch.extend(parameters)

    def arrived(self, note: Gradient) -> None:
        """Note it; the last one of a bucket sends it."""
        if note.arrived:
            self._arrived_again(note)
        note.arrived = self._some_arrived = True
        bucket = None if self._at_the_end else note.bucket
        if bucket is not None:
            bucket.open()
            if note.at_once:
                bucket.take(note, self._balancer.weight)
        gradient = note.parameter.grad
        assert gradient is not None, "its hook was called"
        note.note(gradient, by_value=self._first_batch)
        if bucket is None:  # in the first round layouts are not known yet; what is thawed leaves at the end, too
            self._some_wait = True
            return
        bucket.waits_for -= 1
        if not bucket.waits_for:
            self._is_full(bucket)

    def _is_full(self, bucket: Bucket) -> None:
        carrier = self._carrier
        if bucket is not carrier:
            if carrier is None and len(self._under_way) + 1 == self._expected:
                self._post_table()
            self._send(bucket)
        if carrier is not None and _is_held_back(carrier) and len(self._under_way) + 1 >= self._expected:
            self._send(carrier)

    def _arrived_again(self, note: Gradient) -> None:
        """Of another backward pass, which has added to it."""
        if not self._at_the_end:
            raise RoundStateError(
                f"the gradient of {self._names[note.parameter]!r} was computed twice before step(), and the first one "
                "is on its way already, for the first batch had one backward pass; add the losses and call backward() "
                "once per batch, or as often in the first batch as in others"
            )
        self._several_passes = True
        gradient = note.parameter.grad
        assert gradient is not None, "its hook was called"
        if gradient is note.tensor and gradient._version != note.version + 1:
            self._altered.append(note)

    def forget(self) -> None:
        """The round is abandoned, and nothing of it has left."""
        self._some_arrived = self._some_wait = False
        self._altered.clear()
        self._aside.clear()
        for gradient in self._gradients.values():
            gradient.forget()
        for bucket in self._buckets:
            bucket.forget()

    def release(self) -> None:
        """Let go of memory that is kept from round to round."""
        for bucket in self._buckets:
            bucket.release()

    def set_aside(self) -> Iterable[torch.Tensor]:
        """Those on their way: they are gradients of the whole micro-batch, and need not be computed again."""
        self._aside = []
        self._some_arrived = self._some_wait = False
        for bucket in self._buckets:
            if bucket.under_way is None:
                bucket.forget()
                bucket.release()  # memory is short
            else:
                self._aside += bucket.members
        for gradient in self._gradients.values():
            if gradient.sent is None:
                gradient.forget()
        return [gradient.parameter for gradient in self._aside]

    def finish(self) -> None:
        """Wait for the sums, once zeros are sent for gradients that did not arise here: another rank may have them."""
        for gradient in self._aside:
            gradient.parameter.grad = gradient.sent
        self._aside.clear()
        if self._some_arrived:
            self._first_batch, self._at_the_end = False, self._several_passes
        if filled := len(self._under_way) + (self._carrier is not None and _is_held_back(self._carrier)):
            self._expect(filled)
        if self._table is None and self._pattern_now() != self._pattern:
            self._post_table()  # first: what follows waits for the others, which is not computing
        heard = self._table is not None and self._told != self._pattern
        if heard:
            self._await_table()  # which stops all ranks, if not all of them have changed what they train
            self._arrange()
        if self._some_wait:  # without buckets formed anew: thawed, and frozen again since
            self._require_a_bucket()
        held_back = [bucket for bucket in self._buckets if bucket.under_way is None]
        changed = [*self._altered, *(m for b in held_back for m in b.members if m.arrived and m.changed)]
        self._altered.clear()
        if self._table is None and self._carrier is None:
            self._post_table()
        for bucket in held_back:
            self._send(bucket)
        changed += self._collect([b for b in self._under_way if b is not self._carrier and b.summed])
        if not heard:
            self._await_table(self._last_but_one_has_come)
        changed += self._collect([bucket for bucket in self._under_way if bucket.under_way is not None])
        summed, self._under_way = self._under_way, []
        self._some_arrived = False
        correction = self._agree()
        if changed:
            raise RoundStateError(f"the gradient of {self._names[changed[0].parameter]!r} {_CHANGED}")
        if correction != 1.0:
            members = [member for bucket in summed for member in bucket.members]
            torch._foreach_mul_([m.parameter.grad for m in members if m.parameter.grad is not None], correction)
        self._layouts.back_to_rows()
        if heard:
            self._choose_carrier(self._buckets)

    def _last_but_one_has_come(self) -> bool:
        """Whether the bucket before the last is summed: the last rank is near the end of its backward pass then.

        Not told of rows and of what is compressed.
        """
        if len(self._under_way) < 2:
            return False
        bucket = self._under_way[-2]
        return bucket.under_way is None or bucket.summed

    def _expect(self, filled: int) -> None:
        """How many buckets are likely to fill by themselves: fewer than before only if that was so twice.

        Where branches of a model come and go, the table would leave before the last gradient is computed.
        """
        if filled > self._expected or filled == self._filled:
            self._expected = filled
        self._filled = filled

    def _collect(self, buckets: list[Bucket]) -> list[Gradient]:
        """Wait for their sums, which become the gradients. Returns what is not what was sent."""
        changed = []
        for bucket in buckets:
            members = bucket.members
            for member in members:
                sent = member.sent
                assert sent is not None, "it was sent with its bucket"
                if member.parameter.grad is not sent or sent._version != member.version:
                    changed.append(member)
            assert bucket.under_way is not None, "it was sent"
            bucket.under_way.finish()
            changed += bucket.moved()
            bucket.under_way = None
            for member in members:
                member.sent = None
            bucket.forget()
        return changed

    def _pattern_now(self) -> bytes:
        return bytes(map(_TRAINED, self._names))

    def _trained(self) -> int:
        self._told = self._pattern_now()
        return checksum(self._told)

    def _arrange(self) -> None:
        """Form the buckets anew, where what is trained has changed: by that alone, so that all ranks do it alike.

        A bucket stays if all of it is still trained. Of the others none has left on any rank that froze before its
        backward pass, for a frozen parameter has no gradient that would fill its bucket. Who freezes later may do so
        with all of a bucket that has left, as its sum is under way in any case.
        """
        self._layouts.agree()
        self._pattern = self._told
        kept = [b for b in self._buckets if all(m.parameter.requires_grad for m in b.members)]
        self._altered += [m for b in self._buckets if b not in kept and b.under_way is None for m in b.moved()]
        for gradient in self._gradients.values():
            if gradient.bucket not in kept:
                gradient.bucket = gradient.place = None  # its hook stays, and must not fill what is not there any more
        held = {member for bucket in kept for member in bucket.members}
        free = [g for p, g in self._gradients.items() if p.requires_grad and g not in held]
        by_rows = self._layouts.known_rows
        new = [Bucket(self._name(members[0]), members) for members in buckets_of(free[::-1], by_rows)]
        self._require_a_bucket()
        if any(g.sent is not None for g in free):  # the others of its bucket would leave twice
            self._refuse_frozen(p for p, g in self._gradients.items() if g.sent is not None and not p.requires_grad)
        self._buckets = kept + new
        self._choose_carrier(new)
        self._weigh_anew(new)
        self._expected = len(self._buckets)
        self.rearranged = True

    def _require_a_bucket(self) -> None:
        """All that has arrived leaves with one."""
        self._refuse_frozen(p for p, g in self._gradients.items() if g.bucket is None and g.arrived and g.sent is None)
        self._some_wait = False

    def _refuse_frozen(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            raise RoundStateError(
                f"{self._names[parameter]!r} was frozen between backward() and step(), while its gradient waited to be "
                "summed; call requires_grad_(False) before backward() or after step()"
            )

    def _name(self, first: Gradient) -> str:
        return f"{self._prefix}.gradient.{self._names[first.parameter]}"

    def _choose_carrier(self, among: list[Bucket]) -> None:
        """Unless the one that there was stays: of new ones, or of all once these are summed.

        Before, others than new ones may have left already, on this rank or on another.
        """
        if self._carrier not in self._buckets:
            able = filter(self._can_carry, reversed(among))
            self._carrier = min(able, key=attrgetter("size"), default=None)
            if self._carrier is not None:
                self._carrier.carry(RoundTable.length(self._balancer.workers))
        if self._carrier is not None:
            self._buckets.remove(self._carrier)
            self._buckets.append(self._carrier)

    def _can_carry(self, bucket: Bucket) -> bool:
        """Whether its gradients are of the table's kind."""
        if self._compression is not None or bucket.dtype != self._table_type:
            return False
        return not any(
            self._layouts.elsewhere(p) or getattr(p, "grad_dtype", p.dtype) != p.dtype or self._layouts.known_rows(p)
            for p in bucket.parameters
        )

    def _weigh_anew(self, buckets: list[Bucket]) -> None:
        """What was weighed on its arrival has another place now."""
        for bucket in buckets:
            bucket.open()
            for member in bucket.members:
                if not member.weighed:
                    continue
                if member.changed:  # which is refused, once it is sent
                    member.weighed = False
                    continue
                bucket.take(member, self._balancer.weight)
                gradient = member.parameter.grad
                assert gradient is not None, "it has arrived"
                member.note(gradient)

    def _post_table(self) -> None:
        """By itself, or with the former carrier: before buckets are formed anew, or where none can carry it."""
        carrier = self._carrier
        if carrier is None:
            super()._post_table()
        elif all(map(_TRAINED, carrier.parameters)):
            self._send(carrier)
        else:
            zeros = carrier.nothing()
            row = self._row()
            table = zeros[-len(row) :].copy_(row)
            self._table = self._wire.start_sum(zeros, carrier.name), table.numpy()

    def _send(self, bucket: Bucket) -> None:
        members = bucket.members
        row = self._row() if bucket is self._carrier and self._table is None else None
        if self._layouts.known_rows(members[0].parameter):
            gradients = [self._rows_of(members[0])]
            rows = self._wire, members[0].parameter, gradients[0], self._balancer.weight, bucket.name
            bucket.under_way = Gather(*rows, self._compression)
        else:
            self._altered += [member for member in members if member.weighed and member.changed]
            gradients, whole = bucket.fill(self._balancer.weight)
            if row is not None:
                bucket.room.copy_(row)
            if self._compression is not None:
                # One by one, as in stock scripts: a compressor may look at shapes.
                sent = list(map(flat, gradients))
                bucket.under_way = Compressed(self._wire, sent, bucket.name, self._compression)
            else:
                bucket.under_way = dense = Dense(self._wire, whole, bucket.name)
                if row is not None:
                    self._table = dense.handle, bucket.room.numpy()
        for member, gradient in zip(members, gradients, strict=True):  # now: memory may run short above
            member.sent = gradient
            member.version = gradient._version
        self._under_way.append(bucket)

    def _rows_of(self, member: Gradient) -> torch.Tensor:
        parameter = member.parameter
        gradient = self._layouts.nothing(parameter) if parameter.grad is None else parameter.grad
        gradient = parameter.grad = self._layouts.rows(parameter, gradient)
        return gradient


def _is_held_back(carrier: Bucket) -> bool:
    """Whether it is full and has not left."""
    return carrier.under_way is None and not carrier.waits_for
