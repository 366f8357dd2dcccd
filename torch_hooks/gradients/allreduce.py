"""The sum over all ranks that most policies use: one weighted sum of whole gradients at the end of a round.

With what rank i has gathered, A_i, and its weight w_i (see ``Balancer``), the mean gradient over all samples of the
round is ``Σ_i w_i A_i``. Gradients of one type are laid end to end, weighted in one pass, summed, and copied back; a
large one is weighted and summed where it is. The table of the round travels behind the last of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, ClassVar

import torch

from hvd_hetero.errors import RoundStateError
from hvd_hetero.measurement.gradient_noise import rounds_per_measurement
from hvd_hetero.rounds import RoundTable, checksum
from torch_hooks.gradients.buckets import Bucket, SparseBucket, buckets_of
from torch_hooks.gradients.parameter_norm import ParameterNorm, kernels_here
from torch_hooks.gradients.sparse import Layouts, some_numbers
from torch_hooks.gradients.squares import Squares
from torch_hooks.gradients.synchroniser import SynchronisedOptimizer, Synchroniser

_trained = attrgetter("requires_grad")


class Allreduce(Synchroniser):
    """The mean gradient over all samples of the round, on every rank.

    ``compression`` is Horovod's (``compress`` and ``decompress``), applied to weighted gradients; the table is never
    compressed. Sparse gradients travel as rows (``torch_hooks.gradients.sparse``), unless ``sparse_as_dense``.
    """

    keeps_ranks_alike: ClassVar[bool] = True

    def __init__(
        self, trained: SynchronisedOptimizer, *, compression: Any = None, sparse_as_dense: bool = False
    ) -> None:
        super().__init__(trained)
        self._wire = trained.wire.new_group()
        self._balancer.agreement.kernels = kernels_here()
        self._compression = compression
        self._layouts = Layouts(self._names, self._prefix, self._optimizer, trained.wire, as_dense=sparse_as_dense)
        self._buckets: list[Bucket | SparseBucket] = []
        self._carrier: Bucket | None = None
        """The bucket with room for the table; the last."""
        self._trained_flags = b""
        """Which parameters were trained when the buckets were made."""
        self._own: list[torch.Tensor] = []
        """The squares of what this rank sends, in a round that is measured."""
        self._squares: Squares | None = None
        self._watch()

    def extend(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sum the gradients of these parameters, too."""
        self._layouts.extend(parameters)
        self._watch()

    def _watch(self) -> None:
        self._norm = ParameterNorm(self._names)
        self._balancer.agreement.watch(self._norm.watched)
        # Another piece of the parameters may be due in the next round now than the one that was taken.
        self._shown = 0.0, 0.0

    def finish(self) -> None:
        """Sum the accumulated gradients of all ranks; one that does not exist on this rank counts as zeros."""
        # Nothing leaves during the backward pass, though the transfer could hide behind it. In a round of k
        # micro-batches it could hide behind the last of k passes at most, and rounds of one have other reducers, which
        # do overlap (LoadBalance.scale). So these lose 0 to 3 % to stock Horovod (overhead_torch_convolutional.md and
        # …_10_tensors.md of benchmarks/results), and rounds of several nothing that shows (speed_torch_half.md).
        weight = self._balancer.gradient.factor
        now = bytes(map(_trained, self._names))
        changed, self._trained_flags = now != self._trained_flags, now
        if changed:
            self._require_no_gradient_of_frozen()
            # Ranks must agree on what is trained before anything of another size leaves. So the former buckets travel
            # once more, full of zeros, with the table: it stops all ranks if only some have changed what they train.
            self._look(next((p.grad for p in self._names if p.grad is not None), None))
            self._send(None)
            self._collect()
            self._layouts.agree()
            self._rebuild_buckets()
        self._own, measures = [], self._balancer.measures_noise(self._every)
        self._send(weight, table=not changed, measures=measures)
        self._collect()
        correction = self._balancer.agree()
        self._squares = self._measured(correction) if measures else None
        for bucket in self._buckets:
            bucket.take_apart(correction)
        self._layouts.back_to_rows()
        self._broken = False

    def _require_no_gradient_of_frozen(self) -> None:
        # The optimizer inside would step by it, and it is in no bucket: each rank would take its own.
        for parameter, name in self._names.items():
            if parameter.grad is not None and not parameter.requires_grad:
                raise RoundStateError(
                    f"{name!r} was frozen between backward() and step(), while its gradient waited to be summed; call "
                    "requires_grad_(False) before backward() or after step()"
                )

    def _measured(self, correction: float) -> Squares:
        """Return the squares of a round that is agreed, before its sums are corrected."""
        samples, own, mean = self._balancer.square_factors(correction)
        # A gradient scaler's factor is still in all gradients.
        unscaled = math.exp(-2.0 * self.scale)
        sums = [bucket.square() for bucket in self._buckets]
        return Squares.of(samples, unscaled * own, self._own, unscaled * mean, sums)

    def _squares_before(self) -> tuple[float, float, float]:
        return (0.0, 0.0, 0.0) if self._squares is None else self._squares.read()

    def _send(self, weight: float | None, *, table: bool = True, measures: bool = False) -> None:
        """Send all buckets, without a weight full of zeros, and the table with the last one that can carry it."""
        for bucket in self._buckets:
            numbers = bucket.fill(weight)
            if measures:
                self._own.append(bucket.square())
            self._look(numbers)
            if table and bucket is self._carrier:
                # In the same collective, so that agreeing on the round costs no separate one.
                bucket.room.copy_(self._row())
                self._table = bucket.send(self._wire), bucket.room.numpy()
            else:
                bucket.send(self._wire)
        if table and self._table is None:
            self._post_table()

    def _collect(self) -> None:
        """Wait for the table, if one is on its way, and for the sums."""
        if self._table is not None:
            self._await_table(self._last_but_one_has_come)
        for bucket in self._buckets:
            bucket.collect(self._wire)

    def _last_but_one_has_come(self) -> bool:
        """Return whether what was sent before the table is summed: then the last rank has come."""
        before = self._buckets if self._carrier is None else self._buckets[:-1]
        return bool(before) and before[-1].summed(self._wire)

    def _rebuild_buckets(self) -> None:
        trained = {p: f"{self._prefix}.gradient.{name}" for p, name in self._names.items() if p.requires_grad}
        self._buckets = buckets_of(trained, self._layouts, self._compression)
        # A compressor would round the table's numbers, and from a GPU the host would have to wait for it.
        able = [b for b in self._buckets if isinstance(b, Bucket) and b.can_carry(self._table_type, self._layouts)]
        self._carrier = min(able, key=attrgetter("size"), default=None) if self._compression is None else None
        if self._carrier is not None:
            self._carrier.carry(RoundTable.length(self._balancer.workers))
            self._buckets.remove(self._carrier)
            self._buckets.append(self._carrier)
        numbers = sum(bucket.size for bucket in self._buckets)
        self._every = rounds_per_measurement(numbers, decides=self._balancer.planner.goodput is not None)
        self.thawed = True

    def _trained(self) -> int:
        return checksum(self._trained_flags)

    def _look(self, gradient: torch.Tensor | None) -> None:
        """Note whether a gradient is finite, by some of its numbers: a loss's NaN reaches all of them."""
        if self._broken or self._balancer.agreement.allow_nan or not self._balancer.gradient.factor:
            return
        # The host would have to wait for an accelerator's numbers.
        if gradient is None or gradient.device.type != "cpu":
            return
        some = some_numbers(gradient)
        # The sum is quicker, but may overflow where all numbers are finite.
        self._broken = not (math.isfinite(some.sum()) or bool(some.isfinite().all()))
