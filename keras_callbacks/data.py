"""tf.data batches of this rank: for training, whose sizes follow the plan, and for validation."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_hetero.bounds import Said
from hvd_hetero.checks import integer
from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.data.same_data import marks_of
from hvd_hetero.data.sample_costs import NO_COSTS, CostOf, SampleCosts, cost_from
from hvd_hetero.data.sample_order import SampleOrder
from hvd_hetero.data.stream_orders import EndingShard, SharedStream
from hvd_hetero.evaluation import EvaluationSpeeds
from keras_callbacks.load_balance import LoadBalance
from keras_callbacks.pipeline.balanced_dataset import BalancedDataset
from keras_callbacks.pipeline.queue import NO_TRAINING, TOO_FAR_AHEAD, RoundQueue
from keras_callbacks.pipeline.source_checks import check_same_data, check_single, compared
from keras_callbacks.pipeline.sources import DatasetSource, SequenceSource, Source, is_sequence
from keras_callbacks.pipeline.stream import StreamReader
from keras_callbacks.session import FitSession


def resize_batches(
    data: Any,
    balance: LoadBalance,
    *,
    shuffle: bool = False,
    seed: int = 0,
    prefetch: int | None = None,
    stream: Literal["whole", "shard"] | None = None,
    padding_values: Any = None,
    check_data: bool = True,
    weight_of: Callable[..., Any] | None = None,
    cost_of: CostOf | None = None,
    max_micro_batch_cost: Said = None,
) -> BalancedDataset:
    """Return batches for ``fit`` whose sizes follow the plan; their batch dimension is None, so nothing retraces.

    An element is this rank's part of one round. A rank without data gets one sample to stand in, which
    weighs nothing. If the number of rounds of an epoch is known, it is the cardinality, so ``fit`` knows
    ``steps_per_epoch``; if it is not, the callback ends the epoch on all ranks together.

    Under every policy every sample of an epoch goes to exactly one rank, exactly once. From **arrays** any rank takes
    any sample. A **dataset of single samples**, or a **sequence of batches**, is read from front to end.

    ``map`` may follow (one batch at a time, in order). ``prefetch`` behind it does nothing.

    Parameters
    ----------
    data
        Arrays or tensors of one length in any nesting, as ``(x, y)`` or ``(x, y, sample_weight)``; a
        ``tf.data.Dataset`` whose elements are single samples, also of unknown length; or a ``keras.utils.PyDataset``
        (``Sequence``), whose batches are taken apart.
    balance
        The ``LoadBalance`` of this training.
    shuffle, seed
        True: each epoch has another order, drawn from the seed and the epoch's number. A dataset is shuffled
        in a buffer of 10,000 samples; a sequence is shuffled by its batches.
    prefetch
        Batches prepared ahead, L, the same on every rank. Plans are then fixed L rounds ahead, so a change of speed
        shows in the batches L rounds later. With 0, batches are prepared while training waits for them. None: 1, or 0
        if a round can end before its plan is done, or the global batch adapts, and for a stream, whose samples are
        fetched ahead before they are cut.
    stream
        For a dataset or a sequence. ``"whole"``: all ranks read the same samples in the same order, and share them out.
        ``"shard"``: each rank reads samples of its own, such as files that only it reads; an epoch ends with the
        longest shard, and a rank whose shard has ended goes on with samples that weigh nothing. None: ``"whole"``, but
        a dataset with a step ``shard(…)`` for this rank is refused.
    padding_values
        For a dataset whose samples differ in shape: the values that fill them up, one or one for each component, as in
        ``padded_batch``. Each rank's batch is padded by itself, to its longest sample. None: they have one shape.
    check_data
        If True, ranks compare a few numbers of each sample of a round, and stop if their data differ. If a stream's
        functions draw random numbers or run Python, only labels are compared: whole numbers or strings, one a sample.
    weight_of
        The divisor of a batch's mean loss, if not its samples: a function of a batch as for ``Dataset.map``,
        ``lambda x, y: tf.math.count_nonzero(y)``, that returns one number, computed by TensorFlow (by ``tf.where``, not
        ``if``, which is not converted). A third parameter gets sample weights, those of ``class_weight`` of ``fit``
        included. The gradient is then the mean over these of all ranks and micro-batches, as in one process. Not needed
        for the losses of ``compile`` with masks, sample weights or ``reduction="sum"`` (``docs/keras.md``).
    cost_of
        The cost of a sample, if samples differ in it: a number for each or a function of a sample's index; of a
        stream, a function of a sample's components, ``lambda x, y: tf.size(x)``. A round's samples are then divided by
        what they cost instead of by number. For "lb-bsp", "bsp" and ``StaticAllocation``.
    max_micro_batch_cost
        The largest number of samples times the greatest ``cost_of`` among them that memory allows in a micro-batch, for
        all ranks, or a list with one for each. A rank's share is divided into as many micro-batches as that needs, with
        samples of similar cost put together.
    """
    if not isinstance(balance, LoadBalance):
        raise TypeError(f"balance must be a LoadBalance, got {balance!r}; write resize_batches((x, y), balance)")
    session = balance._session
    balancer = session.balancer
    is_stream = isinstance(data, tf.data.Dataset) or is_sequence(data)
    _check_options(data, session, is_stream, stream, padding_values, weight_of)
    if cost_of is None and max_micro_batch_cost is not None:
        raise ValueError(NO_COSTS)
    prefetch = _checked_prefetch(session, prefetch, is_stream)
    balancer.set_rounds_ahead(prefetch)

    compares = check_data and balancer.workers > 1
    order: SampleOrder
    batch_of: Callable[[Any], Any]
    options: dict[str, Any]
    if is_stream:
        by_sample = cost_of if callable(cost_of) else None
        source, seeds = _source(data, session, seed if shuffle else None, stream, padding_values, by_sample)
        compares = compares and stream != "shard"
        reader = StreamReader(source, compared(data, source.spec) if compares else ())
        order = (
            EndingShard(reader.samples, balancer.rank, balancer.workers)
            if stream == "shard"
            else SharedStream(reader.samples, size=source.length, depends_on=seeds)
        )
        order.marks = (lambda samples: [marks for *_, marks, _ in samples]) if compares else None
        batch_of, options = reader.batch_of, {"ends": source.ends}
    else:
        arrays, length = _tensors(data)
        order, known = SharedPermutation(length, shuffle=shuffle, seed=seed), _KnownBatches()
        if compares:
            columns = [np.asarray(array) for array in tf.nest.flatten(arrays)]
            order.marks = lambda indices: np.stack([marks_of(column, indices) for column in columns], axis=1)
        batch_of, options = indices_of, {"show": known.show}
    if cost_of is not None:
        costs = cost_of
        if callable(cost_of):  # arrays are as they are, so their costs are known
            of_index = cost_of
            costs = (
                operator.itemgetter(-1) if is_stream
                else [cost_from(of_index, i, f"index {i}") for i in range(length)]
            )  # fmt: skip
        order.costs = SampleCosts.of(
            costs, session.policy, balancer.meter.learner.enable_costs(), None if is_stream else length,
            max_micro_batch_cost, shared=stream != "shard", devices=session.devices,
        )  # fmt: skip
    queue = session.course.queue = RoundQueue(
        order, balancer, batch_of, weight_of=weight_of, has_micro_batches=max_micro_batch_cost is not None, **options
    )
    batch = reader.mapped(session.calls.host.guard(queue.part)) if is_stream else _gather(arrays, known)
    return BalancedDataset(_numbered(queue).map(batch).with_options(_options(tuned=is_stream)), queue, prefetch)


def validation_batches(data: Any, balance: LoadBalance, batch_size: int = 32) -> tf.data.Dataset:
    """Return this rank's part of ``data`` in batches, as ``validation_data`` of ``fit`` or for ``evaluate``.

        shared = validation_batches((x_val, y_val), balance, batch_size=64)
        model.fit(batches, validation_data=shared, callbacks=[balance, EarlyStopping("val_loss")])

    Each evaluation divides the samples anew, in proportion to the speeds that training has shown, and equally while
    none are known; each sample goes to one rank. ``fit`` joins the figures over the ranks, and so does ``evaluate``
    with ``callbacks=[balance]``. Fewer samples than ranks go whole to each rank.

    ``data``: as for ``resize_batches``, but not a sequence; a dataset must have a known length. ``batch_size`` is the
    mean over the ranks: all evaluations have equally many batches on all ranks, and faster ranks larger ones.
    """
    samples = data if isinstance(data, tf.data.Dataset) else tf.data.Dataset.from_tensor_slices(_tensors(data)[0])
    batch_size = integer("batch_size", batch_size, 1, remedy="give the samples of a batch at equal shares")
    length, balancer = int(samples.cardinality()), balance._session.balancer
    if length < 1:
        raise ValueError(
            "data must be a dataset whose length is known, and above 0, to be divided among the ranks; put "
            ".apply(tf.data.experimental.assert_cardinality(samples)) behind it"
        )
    workers, speeds = (balancer.workers if length >= balancer.workers else 1), EvaluationSpeeds(balancer)
    # Constant, since Keras takes the number of the first evaluation for that of all.
    batches = max(min(-(-length // (workers * batch_size)), length // workers), 1)

    def own_part() -> NDArray[np.int64]:
        if workers == 1:
            return np.array([0, length])
        plan = speeds.plan(length).with_equal_counts(batches)
        return np.array([plan.start(balancer.rank), plan.samples[balancer.rank]])

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def part(_: Any) -> tf.data.Dataset:
        begin, count = tf.unstack(tf.ensure_shape(tf.numpy_function(own_part, [], tf.int64), [2]))
        size, larger = count // batches, count % batches
        end = begin + larger * (size + 1)
        first = samples.skip(begin).take(end - begin).batch(size + 1)
        return first.concatenate(samples.skip(end).take((batches - larger) * size).batch(size))

    return tf.data.Dataset.range(1).flat_map(part).apply(tf.data.experimental.assert_cardinality(batches))


def _check_options(
    data: Any, session: FitSession, is_stream: bool, stream: str | None, padding_values: Any, weight_of: Any
) -> None:
    if stream not in (None, "whole", "shard") or (stream is not None and not is_stream):
        raise ValueError(
            f"stream must be 'whole' or 'shard', and is for a dataset or a sequence; got {stream!r} with "
            f"{type(data).__name__}: leave it out for arrays"
        )
    if padding_values is not None and not isinstance(data, tf.data.Dataset):
        raise ValueError(
            f"padding_values is for a tf.data.Dataset of single samples, got {padding_values!r} with "
            f"{type(data).__name__}; make one by from_generator, or leave it out"
        )
    if weight_of is not None and not callable(weight_of):
        raise TypeError(f"weight_of must be a function of a batch, got {weight_of!r}; write weight_of=lambda x, y: …")
    if weight_of is not None and not session.weighs:
        raise ValueError(
            f"weight_of does not go with policy {session.policy.name!r}; leave it out, or use policy='lb-bsp'"
        )


def _checked_prefetch(session: FitSession, prefetch: int | None, is_stream: bool) -> int:
    planner = session.balancer.planner
    if prefetch is None:
        return int(planner.keeps_total and not is_stream)
    prefetch = integer("prefetch", prefetch, 0, remedy="give a whole number of batches, the same on every rank")
    # How many samples a round takes is known only when the one before is over, so no batch can be made ahead.
    if prefetch and not planner.keeps_total:
        cause = f"policy {session.policy.name!r}" if planner.goodput is None else "global_batch=Goodput(…)"
        raise ValueError(
            f"prefetch must be 0 under {cause}, got {prefetch}: how many samples a round takes is known only when the "
            "one before is over"
        )
    if prefetch and is_stream:
        raise ValueError(
            f"prefetch must be 0 for a dataset, got {prefetch}: its samples are fetched ahead before they are cut into "
            "batches; put what is slow into a map of the dataset, with num_parallel_calls"
        )
    return prefetch


def _numbered(queue: RoundQueue) -> tf.data.Dataset:
    """Return the dataset of an epoch's round numbers."""
    # Its cardinality tells fit the steps of an epoch. For "infinite" fit needs steps_per_epoch; for "unknown", as where
    # the end is not known beforehand, the callback ends the epoch.
    if queue.rounds is not None:
        return tf.data.Dataset.range(queue.rounds)
    numbers = tf.data.Dataset.counter()
    return numbers.take_while(lambda _: True) if queue.ends else numbers


def _options(*, tuned: bool) -> tf.data.Options:
    options = tf.data.Options()
    # By default tf.data adds another prefetch, and runs plain maps in parallel: both ask for batches too far ahead.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    if not tuned:
        # There is nothing to tune in arrays; and the tuner's thread keeps an iterator that is given up waiting, at
        # times for most of a minute (seen at the end of processes). A stream's own pipeline may need it.
        options.autotune.enabled = False
    return options


def _source(
    data: Any, session: FitSession, seed: int | None, stream: str | None, padding: Any, cost_of: Any
) -> tuple[Source, int]:
    """Return what reads a dataset or a sequence, and a checksum of the seeds of its shuffles."""
    if not isinstance(data, tf.data.Dataset):
        return SequenceSource(data, seed, cost_of=cost_of), 0
    seeds = 0
    if stream != "shard":
        seeds = check_same_data(data, session.balancer.rank, session.balancer.workers, certain=stream == "whole")
        in_order = tf.data.Options()
        in_order.deterministic = True
        data = data.with_options(in_order)
    # The first round shows all ranks a shard without samples, and they stop together.
    source = DatasetSource(data, seed, may_be_empty=stream == "shard", padding=padding, cost_of=cost_of)
    check_single(data)
    return source, seeds


def indices_of(part: Any) -> Any:
    """Return the indices to gather for a rank, or that of the first sample, which stands in, if it has none."""
    return part if len(part) else np.zeros(1, dtype=np.int64)


def _tensors(data: Any) -> tuple[Any, int]:
    """Return the arrays as tensors, and their common length."""
    if isinstance(data, tuple):
        # As Keras does, take (x, y, None) for (x, y).
        data = tuple(part for part in data if part is not None)
    leaves = tf.nest.flatten(data)
    if others := [leaf for leaf in leaves if not getattr(leaf, "shape", None)]:  # no array, or one of no dimension
        raise TypeError(
            "data must be arrays or tensors with a sample in each row, a tf.data.Dataset of single samples, or a "
            f"keras.utils.PyDataset of batches; got {type(others[0]).__name__}. Turn lists into arrays by np.asarray; "
            "make a dataset of a generator by tf.data.Dataset.from_generator(function, output_signature=…), and put "
            ".unbatch() behind one that yields batches"
        )
    lengths = {int(leaf.shape[0]) for leaf in leaves}
    if len(lengths) != 1:
        raise ValueError(f"all arrays of data must hold equally many samples, got {sorted(lengths)}; cut them alike")
    # Separate tensors, not constants of the graph, which are limited to two gigabytes and copied.
    with tf.device("CPU:0"):
        tensors = tf.nest.map_structure(lambda a: tf.convert_to_tensor(a if tf.is_tensor(a) else np.asarray(a)), data)
    return tensors, lengths.pop()


class _KnownBatches:
    """The batches whose sizes are decided, in a variable that the pipeline reads: lists of indices, flattened.

    Number of the first, how many, whether training has begun, offsets of each and of the end, indices of all.
    """

    def __init__(self) -> None:
        self._begun = False
        with tf.device("CPU:0"):
            self._flat = tf.Variable(np.zeros(4, np.int64), shape=[None], trainable=False)

    def show(self, first: int, parts: list[Any]) -> None:
        """Replace the known batches by these."""
        offsets = itertools.accumulate(map(len, parts), initial=0)
        flat = np.concatenate([np.array([first, len(parts), self._begun, *offsets], np.int64), *parts])
        # The first call is for a look at one batch before training; each later one comes as a round begins.
        self._begun = True
        # Not by assign(), whose checks take longer than all else here, in every round.
        tf.raw_ops.AssignVariableOp(resource=self._flat.handle, value=flat)

    def look_up(self, number: tf.Tensor) -> tf.Tensor:
        """Return the indices of a batch, in the pipeline's graph."""
        flat = tf.identity(self._flat)
        nth, count = number - flat[0], flat[1]
        there, begun = tf.logical_and(nth >= 0, nth < count), flat[2] > 0
        with tf.control_dependencies(
            [
                tf.debugging.Assert(tf.logical_or(there, begun), [NO_TRAINING]),
                tf.debugging.Assert(tf.logical_or(there, tf.logical_not(begun)), [TOO_FAR_AHEAD]),
            ]
        ):
            rest = flat[count + 4 :]
            return rest[flat[nth + 3] : flat[nth + 4]]


def _gather(arrays: Any, known: _KnownBatches) -> Callable[[Any], Any]:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def batch(number: tf.Tensor) -> Any:
        indices = known.look_up(number)
        return tf.nest.map_structure(lambda array: tf.gather(array, indices), arrays)

    return cast(Callable[[Any], Any], batch)
