"""The allreduce that most policies use: gradients leave in buckets, as the backward pass fills them.

A call into Horovod costs Python several microseconds, and so does every look into a dictionary by tensor, whose hash is
a function of Python. With hundreds of tensors that is a hundredth of a step, or more. So gradients are gathered in
buckets (``communication.bucket_sizes``), each of which is one tensor to Horovod (``gradients.memory``), one call and
one wait; what is known of a gradient is found once, when its hook is made.

The table travels with the carrier (``gradients.arrangement``). In a round that begins to train other parameters, the
ranks must agree on these before a bucket is formed again. The table then travels with the former carrier, whose
gradients are zeros if they will leave with other buckets. It travels by itself in the very first round, and where no
bucket can carry it.

Carrier and table have their own line on the wire, and the buckets another, whose calls have an order
(``gradients.order``). What comes first on a rank, the table or some bucket, may so differ between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from hvd_hetero.errors import RoundStateError
from torch_hooks.gradients.arrangement import Arrangement
from torch_hooks.gradients.buckets import Bucket, Dense, Gradient, flat
from torch_hooks.gradients.compression import Compressed
from torch_hooks.gradients.memory_in_use import MemoryInUse
from torch_hooks.gradients.order import Order
from torch_hooks.gradients.parameter_norm import ParameterNorm, kernels_here
from torch_hooks.gradients.sparse import Gather, Layouts
from torch_hooks.gradients.synchroniser import Synchroniser, Trained
from torch_hooks.wires.choice import TorchLine

__all__ = ["Allreduce"]

_CHANGED = (
    "was changed between backward() and step(), while it was on its way to the other ranks. Clip or unscale in "
    "optimizer.register_step_pre_hook(…), or write: if optimizer.synchronize(): clip; with "
    "optimizer.skip_synchronize(): optimizer.step(). transformers' Trainer clips even at "
    "max_grad_norm=0 (docs/porting.md)"
)
_LOOKED_AT = 2**12  # numbers of a bucket, some microseconds: a loss's NaN reaches all of them (arbitrary)


class Allreduce(Synchroniser):
    """The mean gradient over all samples of the round, on every rank.

    In the last backward pass every bucket goes on the wire as soon as it is full, with its weight already applied:
    factors handed to Horovod would have to be equal on all ranks. (Where the first batch of a rank had several passes,
    as in scripts that do not add their losses, its buckets leave at ``step()``.) Each large gradient is read
    once: on its way to its bucket's memory, or where it leaves alone. (Where all weights are equal, Horovod could
    divide, which is the same work in its thread; but what is averaged and what is summed would be two collectives.)

    ``compression`` is Horovod's (``compress`` and ``decompress``), applied to weighted gradients; the table is never
    compressed. Sparse gradients travel as rows (``torch_hooks.gradients.sparse``), unless ``sparse_as_dense``.
    """

    keeps_ranks_alike: ClassVar[bool] = True

    def __init__(self, trained: Trained, *, compression: Any = None, sparse_as_dense: bool = False) -> None:
        super().__init__(trained)
        names, prefix = self._names, self._prefix
        self._table_wire: TorchLine = trained.wire.line()
        self._bucket_wire: TorchLine = trained.wire.line()
        self._balancer.kernels = kernels_here()
        self._watch()
        self._compression = compression
        self._layouts = Layouts(names, prefix, self._optimizer, self._wire, as_dense=sparse_as_dense)
        able = self._table_type if compression is None else None
        workers, limits = self._balancer.workers, self._bucket_wire.limits
        self._arrangement = Arrangement(names, prefix, self._layouts, workers, able, limits)
        self._order = Order(self._wire, self._bucket_wire, self._arrangement, self._layouts, f"{prefix}.order")
        self._in_use = MemoryInUse(self._arrangement, self._optimizer, trained.arrangements)
        self._all_apart = False
        """True if no bucket of this round will write into memory that is in use."""
        self._under_way: list[Bucket] = []
        self._expected = 0
        """Buckets that fill by themselves."""
        self._filled = -1  # so many did in the last round
        self._aside: list[Gradient] = []
        """Gradients of a micro-batch that failed after they were sent."""
        self._some_arrived = False
        self._some_wait = False
        """True: some gradients wait for the rest of their bucket."""
        self._altered: list[Gradient] = []
        """Gradients that the user has modified while they waited in a bucket."""
        self._first_batch = True
        """True: no batch had data before. It shows how gradients come, and whether the loop changes them."""
        self._at_the_end = True
        """True: nothing leaves before ``finish``: in the first batch, and later if that had several backward passes."""
        self._several_passes = False

    @property
    def under_way(self) -> bool:
        """True if gradients are on their way, or wait for others to leave with."""
        return self._some_arrived or bool(self._under_way) or self._table is not None

    @property
    def gradients_left(self) -> bool:
        """True if something cannot be taken back."""
        return bool(self._under_way) or self._table is not None

    def note_of(self, parameter: torch.Tensor) -> Gradient:
        """Return the record of its gradient."""
        return self._arrangement.of(parameter)

    def extend(self, parameters: Iterable[torch.Tensor]) -> None:
        """Train these parameters, too."""
        self._arrangement.extend(parameters)
        self._layouts.extend(parameters)
        self._watch()

    def _watch(self) -> None:
        self._norm = ParameterNorm(self._names)
        self._balancer.agreement.watch(self._norm.watched)
        self._shown = 0.0, 0.0  # the next piece to show may be another one now

    def arrived(self, note: Gradient) -> None:
        """Note a gradient that has arrived; the last one of a bucket sends it."""
        if note.arrived:
            self._arrived_again(note)
        note.arrived = self._some_arrived = True
        bucket = None if self._at_the_end else note.bucket
        gradient = note.parameter.grad
        assert gradient is not None, "its hook was called"
        if bucket is not None:
            if not self._all_apart:
                self._leave_memory_in_use()
            elif gradient._version and gradient is not note.tensor:  # a hook's, or the sum of several uses
                self._in_use.leave_for(note, gradient)
            if not bucket.opened:
                bucket.open()
                self._in_use.opened()
            if note.at_once:
                gradient = bucket.take(note, self._balancer.weight)
        note.note(gradient, by_value=self._first_batch)
        if bucket is None:  # in the first round layouts are not known yet; what is thawed leaves at the end, too
            self._some_wait = True
            return
        bucket.waits_for -= 1
        if not bucket.waits_for:
            self._is_full(bucket)

    def _is_full(self, bucket: Bucket) -> None:
        carrier = self._arrangement.carrier
        if bucket is not carrier:
            if carrier is None and len(self._under_way) + 1 == self._expected:
                self._post_table()
            self._send(bucket)
            self._order.filled(bucket)  # once it has left: what does not fit into memory fills again
        if (
            carrier is not None
            and self._arrangement.carrier_is_held_back
            and len(self._under_way) + 1 >= self._expected
        ):
            self._send(carrier)

    def _arrived_again(self, note: Gradient) -> None:
        """Note a gradient of another backward pass, which has added to it."""
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

    def _leave_memory_in_use(self) -> None:
        self._in_use.leave()
        self._all_apart = True

    def forget(self) -> None:
        """Forget the round, of which nothing has left."""
        self._broken = self._some_arrived = self._some_wait = self._all_apart = False
        self._altered.clear()
        self._aside.clear()
        for gradient in self._arrangement.gradients:
            gradient.forget()
        for bucket in self._arrangement.buckets:
            bucket.forget()

    def release(self) -> None:
        """Let go of memory that is kept from round to round: no round follows."""
        self._in_use.close()
        for bucket in self._arrangement.buckets:
            bucket.release()

    def set_aside(self) -> Iterable[torch.Tensor]:
        """Return the parameters whose gradients are on their way: these are whole, and need not be computed again."""
        self._aside = []
        self._some_arrived = self._some_wait = self._all_apart = False
        for bucket in self._arrangement.buckets:
            if bucket.under_way is None:
                bucket.forget()
                bucket.release()  # memory is short
            else:
                self._aside += bucket.members
        for gradient in self._arrangement.gradients:
            if gradient.sent is None:
                gradient.forget()
        return [gradient.parameter for gradient in self._aside]

    def finish(self) -> None:
        """Wait for the sums, once zeros are sent for gradients that did not arise here: another rank may have them."""
        for gradient in self._aside:
            gradient.parameter.grad = gradient.sent
        self._aside.clear()
        if not self._all_apart:
            self._leave_memory_in_use()
        if self._some_arrived:
            self._first_batch, self._at_the_end = False, self._several_passes
        if filled := len(self._under_way) + self._arrangement.carrier_is_held_back:
            self._expect(filled)
        arrangement = self._arrangement
        if self._table is None and arrangement.outdated:
            self._post_table()  # first: what follows waits for the others, which is not computing
        heard = self._table is not None and arrangement.told
        if heard:
            self._await_table()  # stops all ranks, if only some have changed what they train
            self._altered += arrangement.renew(self._balancer.weight)
            self._order.renew()
            self._expected = len(arrangement.buckets)
            self.rearranged = True
        elif self._some_wait:  # thawed, and frozen again since
            arrangement.require_a_bucket()
        self._some_wait = False
        held_back = [bucket for bucket in arrangement.buckets if bucket.under_way is None]
        changed = [*self._altered, *(m for b in held_back for m in b.members if m.arrived and m.changed)]
        self._altered.clear()
        if self._table is None and arrangement.carrier is None:
            self._post_table()
        for bucket in held_back:
            self._send(bucket)
        changed += self._collect([b for b in self._under_way if b is not arrangement.carrier and b.summed])
        if not heard:
            self._await_table(self._last_but_one_has_come)
        changed += self._collect([bucket for bucket in self._under_way if bucket.under_way is not None])
        summed, self._under_way = self._under_way, []
        self._some_arrived = self._all_apart = self._broken = False
        self._in_use.round_over()
        self._order.next_round(renewed=heard)
        correction = self._agree()
        if changed:
            raise RoundStateError(f"the gradient of {self._names[changed[0].parameter]!r} {_CHANGED}")
        if correction != 1.0:
            members = [member for bucket in summed for member in bucket.members]
            torch._foreach_mul_([m.parameter.grad for m in members if m.parameter.grad is not None], correction)
        self._layouts.back_to_rows()
        if heard:
            arrangement.choose_carrier(arrangement.buckets)
            self._order.next_round(renewed=True)

    def _last_but_one_has_come(self) -> bool:
        """Return whether the bucket before the last is summed: then the last rank is near the end of its backward pass.

        Not known for rows and for compressed gradients.
        """
        if len(self._under_way) < 2:
            return False
        bucket = self._under_way[-2]
        return bucket.under_way is None or bucket.summed

    def _expect(self, filled: int) -> None:
        """Note how many buckets are likely to fill by themselves: fewer than before only if that happened twice.

        Where branches of a model come and go, the table would leave before the last gradient is computed.
        """
        if filled > self._expected or filled == self._filled:
            self._expected = filled
        self._filled = filled

    def _collect(self, buckets: list[Bucket]) -> list[Gradient]:
        """Wait for the sums, which become the gradients; return those that were changed since they were sent."""
        changed = []
        for bucket in buckets:
            for member in bucket.members:
                sent = member.sent
                assert sent is not None, "it was sent with its bucket"
                if member.parameter.grad is not sent or sent._version != member.version:
                    changed.append(member)
            assert bucket.under_way is not None, "it was sent"
            bucket.under_way.finish()
            changed += bucket.moved()
            bucket.under_way = None
            bucket.forget()
        return changed

    def _trained(self) -> int:
        return self._arrangement.tell()

    def _look(self, gradient: torch.Tensor) -> None:
        """Note whether a gradient is finite. Not on an accelerator, for which the host would have to wait."""
        if self._broken or self._balancer.allow_nan or not self._balancer.weight or gradient.device.type != "cpu":
            return
        numbers = (gradient if gradient.layout is torch.strided else gradient._values()).detach().reshape(-1)
        some = numbers[:: len(numbers) // _LOOKED_AT + 1]
        self._broken = not (math.isfinite(some.sum()) or bool(some.isfinite().all()))  # a sum may overflow

    def _post_table(self) -> None:
        """Send the table alone, or with the former carrier: before buckets are formed again, or if none can take it."""
        carrier = self._arrangement.carrier
        for note in self._arrangement.gradients:
            if note.sent is None and note.parameter.grad is not None:
                self._look(note.parameter.grad)
                break
        if carrier is None:
            super()._post_table()
        elif self._arrangement.carrier_is_whole:
            self._send(carrier)
        else:
            zeros = carrier.nothing()
            row = self._row()
            table = zeros[-len(row) :].copy_(row)
            self._table = self._table_wire.start_sum(zeros, carrier.name), table.numpy()

    def _send(self, bucket: Bucket) -> None:
        members = bucket.members
        carries = bucket is self._arrangement.carrier
        wire = self._table_wire if carries else self._bucket_wire
        row = None
        if self._layouts.known_rows(members[0].parameter):
            gradients = [self._rows_of(members[0])]
            self._look(gradients[0])
            rows = wire, members[0].parameter, gradients[0], self._balancer.weight, bucket.name
            bucket.under_way = Gather(*rows, self._compression)
        else:
            self._altered += [member for member in members if member.weighed and member.changed]
            gradients, whole = bucket.fill(self._balancer.weight)
            self._look(whole[: -len(bucket.room)] if carries else whole)
            if carries and self._table is None:
                row = self._row()
                bucket.room.copy_(row)
            if self._compression is not None:
                # One by one, as in stock scripts: a compressor may look at shapes.
                sent = list(map(flat, gradients))
                bucket.under_way = Compressed(wire, sent, bucket.name, self._compression)
            else:
                bucket.under_way = dense = Dense(wire, whole, bucket.name)
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
