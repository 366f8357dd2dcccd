"""The collectives of a round, inside the graph: one base, and one class for each way of averaging.

The table of the round travels in the last message of gradients, or in one of its own.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_hetero.communication import bucket_sizes as division
from hvd_hetero.consistency import PIECE
from hvd_hetero.rounds import RoundTable
from keras_callbacks.step.calls import RoundCalls, RoundWeights

if TYPE_CHECKING:
    from hvd_hetero.topology.mixing import Mixing

_BRANCH_ABOVE_BYTES = 2**16  # below, a product takes some microseconds, and a branch longer to trace (arbitrary)
_MESSAGE_BYTES = 2**26  # of variables: .05 s at 10 Gb/s, beside which a round trip hardly shows (arbitrary)
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices"
"""The gradient of a whole variable, or of some of its rows, as an embedding's."""


class GraphSynchroniser(ABC):
    """Turns one round's gradients of this rank into what its update needs."""

    def __init__(self, calls: RoundCalls, variables: Callable[[], list[tf.Variable]] = list) -> None:
        """``variables`` returns the variables that ranks average, if they do not average gradients."""
        self._calls = calls
        self._variables = variables
        self.correction: tf.Tensor | None = None
        """Planned over actual samples of all ranks, or their weights, in the graph that is traced."""
        self.samples_done: tf.Tensor | None = None
        """All ranks' samples of the round over those that were planned, in the graph that is traced."""
        self._eagerly = tf.function(self._synchronise, autograph=False, reduce_retracing=True)

    def __call__(self, gradients: list[Gradient], weights: tf.Tensor, *, weighed: bool = False) -> list[Gradient]:
        """Return the gradients to update with. ``weights`` are this rank's ``RoundWeights``.

        ``weighed``: the gradients are the mean times the weight already (but NaN may be among 0 times the mean).
        """
        if tf.executing_eagerly():
            # Collectives are matched by the names of nodes, which only graphs have.
            return list(self._eagerly(gradients, weights, weighed))
        return self._synchronise(gradients, weights, weighed)

    @abstractmethod
    def _synchronise(self, gradients: list[Gradient], weights: tf.Tensor, weighed: bool) -> list[Gradient]: ...

    def _mean(
        self,
        tensors: list[tf.Tensor],
        weights: tf.Tensor,
        after: list[Any],
        factor: tf.Tensor | None = None,
        squares: Callable[[list[tf.Tensor], list[tf.Tensor]], list[tf.Tensor]] = lambda sent, sums: [],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return the tensors' sums over all ranks, corrected from planned to actual samples; and the correction.

        What leaves is ``factor`` times the tensors. The table leaves after the tensors in ``after``. ``squares`` makes
        the squared norms for the balancer from the tensors that left and their sums.
        """
        calls = self._calls
        # The last tensors first, as the backward pass brings them. A bucket waits for nothing but its own members.
        backwards = tensors[::-1]
        members = division.divide([size_in_bytes(t) for t in backwards], [t.dtype for t in backwards])
        buckets = [[backwards[i] for i in places] for places in members]
        if factor is not None:
            buckets = [scaled(bucket, factor) for bucket in buckets]
        sent = [*itertools.chain(*buckets)]
        sums, table, counts = self._sums_and_table(buckets, weights, after)
        summed = [*itertools.chain(*sums)]
        # The agreed round is over: a rank's work from then on is its update.
        answer = calls.host.ask(calls.agree, 3, table, *squares(sent, summed), after=summed if calls.apart else ())
        correction, self.samples_done = answer[0], answer[2]
        if calls.balancer.planner.goodput is not None:
            calls.rate_factor.assign(answer[1])
        if counts is not None:
            correction = self._early_correction(weights, counts)
        corrected = itertools.chain.from_iterable(scaled(bucket, correction) for bucket in sums if bucket)
        by_index = dict(zip(itertools.chain.from_iterable(members), corrected, strict=True))
        return [by_index[i] for i in reversed(range(len(tensors)))], correction

    def _sums_and_table(
        self, buckets: list[list[tf.Tensor]], weights: tf.Tensor, after: list[Any]
    ) -> tuple[list[list[tf.Tensor]], tf.Tensor, tf.Tensor | None]:
        """Return the sums of the buckets over all ranks, the table, and the counts for `_early_correction`, or None.

        Counts and row are appended to buckets that carry them at no cost.
        """
        calls = self._calls
        takes_more = [_takes_more(bucket) for bucket in buckets]
        carrier = self._carrier(takes_more)
        broken = []
        if calls.looks:
            # One gradient, since a loss's NaN reaches them all; and not a stand-in's, which weighs nothing.
            looked_at = buckets[carrier or 0][0] if buckets else after[-1]
            broken = [_broken(looked_at) * tf.sign(weights[RoundWeights.GRADIENT])]
        # After the weights too, since the row has that of the gradient.
        row = calls.host.ask(
            calls.report, RoundTable.length(calls.balancer.workers) + 1, calls.learning_rate(), *broken,
            after=[weights, *after], timed=True,
        )  # fmt: skip
        if carrier is not None:
            flag = broken[0] if broken else 0.0
            # As many numbers where none is looked at: ranks on a device may train beside others on processors.
            ranks = tf.one_hot(calls.balancer.rank, calls.balancer.workers, flag, dtype=tf.float64)
            counted = weights[RoundWeights.COUNTED : RoundWeights.PLANNED]
            buckets[carrier].append(tf.cast(tf.concat([counted, ranks], 0), buckets[carrier][0].dtype))
        # A device's clock (``apart``) makes the table some time after the last gradient, which must not wait for it.
        if takes_more and takes_more[-1] and not calls.apart:
            buckets[-1].append(tf.cast(row, buckets[-1][0].dtype))
        else:
            buckets.append([row])
        sums = [self._sum(bucket, number) for number, bucket in enumerate(buckets[:-1])]
        with tf.device("CPU:0") if calls.apart else contextlib.nullcontext():
            sums.append(self._sum(buckets[-1], len(sums)))
        table = tf.cast(sums[-1].pop(), tf.float64)
        return sums, table, None if carrier is None else sums[carrier].pop()

    def _carrier(self, takes_more: list[bool]) -> int | None:
        """Return the number of the bucket that samples are summed along with; None: updates wait for the table."""
        # Where the batch adapts, the table's answer has the factor of the learning rate, so updates wait for it anyway.
        if self._calls.balancer.planner.goodput is not None:
            return None
        # Else they would find their gradients out of the cache. The first bucket that is copied anyway is the earliest
        # that costs nothing; the last one comes with the table, and gains nothing.
        candidates = takes_more if self._calls.apart else takes_more[:-1]
        return candidates.index(True) if True in candidates else None

    def _early_correction(self, weights: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Return the correction by the sum of samples; refuse NaN that ranks have found in that bucket."""
        # Updates do not wait for the table: in a round that it refuses, some may have been made.
        correction, ranks = correction_of(weights[RoundWeights.PLANNED], counts[0]), counts[1:]
        if not self._calls.looks:
            return correction
        host, refuse = self._calls.host, self._calls.refuse
        return tf.cond(tf.reduce_any(ranks > 0), lambda: host.ask(refuse, 1, ranks)[0], lambda: correction)

    def _sum(self, bucket: list[tf.Tensor], number: int) -> list[tf.Tensor]:
        # The same on all ranks, and with this first word: Horovod's elastic mode recognises failures by it.
        name = f"HorovodAllreduce_{self._calls.prefix}_{number}"
        return list(hvd.grouped_allreduce(bucket, op=hvd.Sum, name=name, ignore_name_scope=True))


class GraphAllreduce(GraphSynchroniser):
    """The mean gradient over all samples of the round, on every rank."""

    def _synchronise(self, gradients: list[Gradient], weights: tf.Tensor, weighed: bool) -> list[Gradient]:
        weight = weights[RoundWeights.GRADIENT]
        rows = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
        dense = [g for g in gradients if not isinstance(g, tf.IndexedSlices)]
        own = [_weighted(g, weight, weighed) for g in rows]
        gathered = [self._gather(g, number) for number, g in enumerate(own)]
        arrived = [g.values for g in rows]
        every = self._calls.squares.plan(sum(g.shape.num_elements() or 0 for g in dense))

        def squares(sent: list[tf.Tensor], sums: list[tf.Tensor]) -> list[tf.Tensor]:
            due = weights[RoundWeights.TAKES_SQUARES]
            return _in_some_rounds(every, due, lambda: _squares([*sent, *own], [*sums, *gathered]))

        # A weight of 0 gives 0, whatever NaN a stand-in has made.
        if weighed:
            means, correction = self._mean(dense, weights, dense + arrived, tf.sign(weight), squares)
        else:
            of_type = {dtype: tf.cast(weight, dtype) for dtype in {g.dtype: None for g in dense}}
            # One by one, so that none waits for another, and in place, since they are used only here.
            weighted = [tf.math.multiply_no_nan(g, of_type[g.dtype]) for g in dense]
            means, correction = self._mean(weighted, weights, weighted + arrived, squares=squares)
        self.correction = correction
        of_rows, whole = iter(scaled(gathered, correction)), iter(means)
        return [next(of_rows) if isinstance(g, tf.IndexedSlices) else next(whole) for g in gradients]

    def _gather(self, gradient: tf.IndexedSlices, number: int) -> tf.IndexedSlices:
        """Return the rows of all ranks, laid end to end, as one process has them of the whole batch."""
        # A row that occurs twice stays apart: Keras does not add such rows up before it clips or squares them.
        name = f"HorovodAllgather_{self._calls.prefix}_{number}"
        all_values = hvd.allgather(gradient.values, name=f"{name}_values", ignore_name_scope=True)
        all_indices = hvd.allgather(gradient.indices, name=f"{name}_indices", ignore_name_scope=True)
        all_values = tf.reshape(all_values, [-1, *gradient.values.shape[1:]])  # of no rows, Horovod knows no shape
        return tf.IndexedSlices(all_values, tf.reshape(all_indices, [-1]), gradient.dense_shape)


class GraphNeighbourAverage(GraphSynchroniser):
    """D-PSGD and MATCHA: ``x_i <- sum_j W_ij x_j``, then a step with this rank's own gradient times ``n S_i / S``.

    One ``alltoall`` carries the parameters (``Mixing.exchange``).
    """

    def __init__(self, calls: RoundCalls, variables: Callable[[], list[tf.Variable]], mixing: Mixing) -> None:
        super().__init__(calls, variables)
        self._mixing = mixing

    def _synchronise(self, gradients: list[Gradient], weights: tf.Tensor, weighed: bool) -> list[Gradient]:
        calls = self._calls
        workers, most = calls.balancer.workers, self._mixing.most_neighbours
        computed = [_numbers(g) for g in gradients]
        asked = calls.host.ask(self._partners, workers + 1 + most, after=computed)
        copies, own, others = tf.cast(asked[:workers], tf.int32), asked[workers], asked[workers + 1 :]
        mixed = []
        for number, group in enumerate(by_type(self._variables())):
            flat = end_to_end(group)
            size = int(flat.shape[0])
            received, _ = hvd.alltoall(
                tf.tile(flat, [most]),
                splits=copies * size,
                name=f"HorovodAlltoall_{calls.prefix}_{number}",
                ignore_name_scope=True,
            )
            theirs = tf.linalg.matvec(tf.reshape(received, [most, size]), tf.cast(others, flat.dtype), transpose_a=True)
            mixed.append((group, theirs + tf.cast(own, flat.dtype) * flat))
        _, correction = self._mean([], weights, computed)
        for group, flat in mixed:
            assign(group, flat)
        return scaled(gradients, weights[RoundWeights.GRADIENT] * workers * correction)

    def _partners(self) -> list[float]:
        """Return the exchange of this round, as one list of numbers."""
        copies, own, received = self._mixing.exchange(self._calls.balancer.rank, self._calls.balancer.rounds)
        return [*copies, own, *received]


class GraphLocalUpdates(GraphSynchroniser):
    """ElasticBSP's local updates: after its last step, ``x <- sum_i (S_i / S) x_i``, for weights and state alike."""

    def _synchronise(self, gradients: list[Gradient], weights: tf.Tensor, weighed: bool) -> list[Gradient]:
        variables = [v for v in self._variables() if v.dtype.is_floating]
        values = [v.read_value() for v in variables]  # after the update, which has written them
        weighted = scaled(values, weights[RoundWeights.COUNTED] / weights[RoundWeights.PLANNED])
        for variable, value in zip(variables, self._mean(weighted, weights, weighted)[0], strict=True):
            variable.assign(value)
        return gradients


def _weighted(gradient: tf.IndexedSlices, weight: tf.Tensor, weighed: bool) -> tf.IndexedSlices:
    """Return this rank's rows, weighted; none if it holds no data."""
    kept = tf.where(weight > 0, tf.size(gradient.indices), 0)
    values = gradient.values[:kept]
    if not weighed:
        values *= tf.cast(weight, values.dtype)
    return tf.IndexedSlices(values, gradient.indices[:kept], gradient.dense_shape)


def _in_some_rounds(every: int, now: tf.Tensor, squares: Callable[[], tf.Tensor]) -> list[tf.Tensor]:
    """Return the squares, in one round of ``every``; in others zeros, for which nothing is computed."""
    if every == 0:
        return []
    if every == 1:
        return [squares()]
    # One operation in its branch: laid out there, all were passed over one by one in other rounds, which took 1.09 of
    # the processor time with 102 tensors.
    apart = tf.function(squares, autograph=False, experimental_attributes={"_noinline": True})

    def where_gradients_are() -> tf.Tensor:
        with tf.device(None):
            norms = apart()
        return tf.identity(norms)

    with tf.device("CPU:0"):  # else zeros would wait for a device
        return [tf.cond(now > 0, where_gradients_are, lambda: tf.zeros([2], tf.float64))]


def _squares(*groups: Sequence[Gradient]) -> tf.Tensor:
    """Return the squared norm of each group of gradients."""
    return 2.0 * tf.stack([tf.add_n([_half_square(g) for g in group]) for group in groups])


def _half_square(gradient: Gradient) -> tf.Tensor:
    """Return half of the squared norm; rows that occur twice are added up before."""
    numbers = _numbers(gradient)
    if isinstance(gradient, tf.IndexedSlices):
        rows, places = tf.unique(gradient.indices)
        numbers = tf.math.unsorted_segment_sum(numbers, places, tf.size(rows))
    if numbers.dtype.is_complex:
        numbers = tf.abs(numbers)
    wide = tf.cast(numbers, tf.float32) if numbers.dtype.size < 4 else numbers  # halves would overflow
    return tf.cast(tf.nn.l2_loss(wide), tf.float64)


def scaled(gradients: Sequence[Gradient], factor: tf.Tensor) -> list[Gradient]:
    """Return the gradients times a factor: untouched for 1, and zero for 0, whatever NaN a stand-in has made."""
    if not gradients:
        return []
    tensors = [_numbers(g) for g in gradients]

    def times() -> list[tf.Tensor]:
        return [tf.math.multiply_no_nan(t, tf.cast(factor, t.dtype)) for t in tensors]

    # A branch saves a pass over the memory, and costs two functions to trace.
    if all(t.shape.is_fully_defined() for t in tensors) and sum(map(size_in_bytes, tensors)) <= _BRANCH_ABOVE_BYTES:
        scaled = times()
    else:
        scaled = tf.cond(tf.equal(factor, 1.0), lambda: [tf.identity(t) for t in tensors], times)
    return [
        tf.IndexedSlices(t, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else t
        for g, t in zip(gradients, scaled, strict=True)
    ]


def _numbers(gradient: Gradient) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def correction_of(planned: tf.Tensor, counted: tf.Tensor) -> tf.Tensor:
    """Return the factor from planned to actual samples, or weights, for a sum that was weighted by plans."""
    done = tf.cast(counted, tf.float64)
    return tf.where((planned > 0) & (done > 0), tf.math.divide_no_nan(planned, done), 1.0)


def _broken(tensor: tf.Tensor) -> tf.Tensor:
    """Return 1 if NaN or an infinity is among some of its numbers, else 0."""
    # As many as of a parameter, some microseconds: a look at all would be another pass over the memory.
    some = tf.reshape(tensor, [-1])[:: (tensor.shape.num_elements() or 0) // PIECE + 1]
    return tf.cast(~tf.reduce_all(tf.math.is_finite(some)), tf.float64)


def _takes_more(bucket: list[tf.Tensor]) -> bool:
    """Return whether a few more numbers may travel in the same message at no cost."""
    # Horovod lays several tensors end to end; one large tensor alone it would have to copy for them, there and back.
    copied_anyway = len(bucket) > 1 or size_in_bytes(bucket[0]) < division.ALONE_FROM_BYTES
    return copied_anyway and bucket[0].dtype in (tf.float32, tf.float64)


def buckets(variables: list[tf.Variable]) -> Iterator[list[tf.Variable]]:
    """Yield variables of one type that travel in one message, up to 64 MiB."""
    # One message for each cost a round trip for each: at 10 ms a fit of 100 tensors began with 19 s of them.
    for group in by_type(variables):
        bucket: list[tf.Variable] = []
        size = 0
        for variable in group:
            size += size_in_bytes(variable)
            if bucket and size > _MESSAGE_BYTES:
                yield bucket
                bucket, size = [], size_in_bytes(variable)
            bucket.append(variable)
        yield bucket


def by_type(variables: list[tf.Variable]) -> list[list[tf.Variable]]:
    """Return the variables, grouped by type."""
    groups: dict[tf.DType, list[tf.Variable]] = {}
    for variable in variables:
        groups.setdefault(variable.dtype, []).append(variable)
    return list(groups.values())


def end_to_end(variables: list[tf.Variable]) -> tf.Tensor:
    """Return the variables' numbers, one after the other in one vector."""
    return tf.concat([tf.reshape(v, [-1]) for v in variables], 0)


def assign(variables: list[tf.Variable], flat: tf.Tensor) -> None:
    """Set the variables to the numbers of a vector that ``end_to_end`` has made."""
    parts = tf.split(flat, [v.shape.num_elements() for v in variables])
    for variable, part in zip(variables, parts, strict=True):
        variable.assign(tf.reshape(part, variable.shape))


def size_in_bytes(tensor: tf.Tensor | tf.Variable) -> int:
    """Return the bytes that its numbers take; 0 if the shape is not known."""
    return int(tensor.shape.num_elements() or 0) * int(tensor.dtype.size)
