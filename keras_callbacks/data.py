"""The data side: tf.data batches of this rank, cut by the plan from the order that all ranks share."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import tensorflow as tf

from keras_callbacks.queue import TOO_FAR_AHEAD, ArrayOrder, RoundQueue
from keras_callbacks.stream import StreamOrder

if TYPE_CHECKING:
    from keras_callbacks.load_balance import LoadBalance

__all__ = ["BalancedDataset", "resize_batches"]

logger = logging.getLogger(__name__)

_BATCHES_ARE_FORMED = (
    "the plan forms the batches of resize_batches, and they are not to be {}: do it to the samples before"
)


def resize_batches(
    data: Any,
    balance: LoadBalance,
    *,
    shuffle: bool = False,
    seed: int = 0,
    prefetch: int | None = None,
) -> BalancedDataset:
    """Batches for ``fit`` whose sizes follow the plan, with a ``(None, …)`` batch dimension, so that nothing retraces.

    An element is what this rank holds of one round. A rank that holds nothing gets one sample to stand in, which
    weighs nothing. The number of rounds of an epoch is the cardinality, so ``fit`` knows ``steps_per_epoch``.

    From **arrays**, every sample of an epoch goes to exactly one rank, exactly once, and the samples of a round do not
    depend on the policy. From a **dataset of single samples**, every rank reads its shard (each n-th sample), again
    from the front when it comes to the end; then a fast rank sees its shard more often than a slow one.

    Behind it, ``map`` is welcome (one batch at a time, in order). ``prefetch`` is not needed, and does nothing: what
    is fetched ahead must not be further ahead than plans are.

    Parameters
    ----------
    data
        Arrays or tensors of one length in any nesting, as ``(x, y)`` or ``(x, y, sample_weight)``; or a
        ``tf.data.Dataset`` whose elements are single samples.
    balance
        The ``LoadBalance`` of this training.
    shuffle, seed
        Whether each epoch has an order of its own, drawn from the seed and the epoch's number. A dataset is cut into
        shards first, so its own order must be the same on every rank; then each shard is shuffled.
    prefetch
        Batches prepared ahead, L. Plans are then fixed L rounds ahead, so a change of speed shows in the batches L
        rounds later. The same on every rank. With 0, batches are prepared while training waits for them. None: 1, or 0
        where a round can end before its plan is done, for what comes next is not known then, and for a dataset, whose
        samples are fetched ahead before they are cut.
    """
    from keras_callbacks.load_balance import LoadBalance

    if not isinstance(balance, LoadBalance):
        raise TypeError(f"balance must be a LoadBalance, got {balance!r}; write resize_batches((x, y), balance)")
    stream = isinstance(data, tf.data.Dataset)
    if prefetch is None:
        prefetch = int(balance.policy.keeps_total and not stream)
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"prefetch must be a whole number of batches, 0 or more, got {prefetch!r}")
    if prefetch and not balance.policy.keeps_total:
        raise ValueError(
            f"prefetch must be 0 under policy {balance.policy.name!r}, got {prefetch}: how many samples a round takes "
            "is known only when it is over"
        )
    if prefetch and stream:
        raise ValueError(
            f"prefetch must be 0 for a dataset, got {prefetch}: its samples are fetched ahead before they are cut into "
            "batches; put what is slow into a map of the dataset, with num_parallel_calls"
        )
    balance.balancer.set_lead(prefetch)
    if stream:
        order = StreamOrder(data, balance.balancer.rank, balance.balancer.workers, seed if shuffle else None)
        queue = RoundQueue(order, balance.balancer)
        batch = order.reader(balance.guard(queue.part))
        sample: Callable[[], Any] = order.stand_in
    else:
        arrays, length = _tensors(data)
        known = _Known()
        queue = RoundQueue(ArrayOrder(length, shuffle=shuffle, seed=seed), balance.balancer, known.show)
        batch = _gather(arrays, known)
        sample = lambda: tf.nest.map_structure(lambda array: array[:1], arrays)  # noqa: E731
    balance.use(queue, sample)
    # Without an end, the cardinality is "infinite", and fit must be told steps_per_epoch. With one that is not known
    # beforehand it is "unknown", and the callback ends the epoch.
    numbers = tf.data.Dataset.range(queue.rounds) if queue.rounds is not None else tf.data.Dataset.counter()
    if queue.rounds is None and queue.ends:
        numbers = numbers.take_while(lambda _: True)
    batches = numbers.map(batch)
    options = tf.data.Options()
    # Left to itself tf.data adds a prefetch of its own, and runs plain maps in parallel: both ask too far ahead.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    if not stream:
        # Nothing is there to be tuned; and the tuner's thread keeps an iterator that is given up waiting, at times for
        # most of a minute (seen at the end of processes). A stream's own pipeline may need it.
        options.autotune.enabled = False
    batches = batches.with_options(options)
    return BalancedDataset(batches, prefetch)


class BalancedDataset(tf.data.Dataset):  # type: ignore[misc]
    """A dataset of batches that must be asked for in order, and no further ahead than they are known."""

    def __init__(self, batches: tf.data.Dataset, prefetch: int) -> None:
        self._batches = batches
        self._prefetch = prefetch
        self._inner = batches.prefetch(prefetch) if prefetch else batches  # behind whatever was mapped
        super().__init__(self._inner._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._inner]

    @property
    def element_spec(self) -> Any:
        """Types and shapes of an element."""
        return self._inner.element_spec

    def map(self, map_func: Callable[..., Any], *args: Any, **options: Any) -> BalancedDataset:
        """Apply a function to each batch, one after the other whatever parallelism is asked for."""
        return BalancedDataset(self._batches.map(map_func), self._prefetch)

    def prefetch(self, *args: Any, **options: Any) -> BalancedDataset:
        """Nothing: batches are prefetched as far as ``resize_batches(…, prefetch=…)`` says."""
        logger.debug("prefetch after resize_batches does nothing; use resize_batches(…, prefetch=…)")
        return self

    def repeat(self, *args: Any, **options: Any) -> BalancedDataset:
        """Epoch after epoch, each in an order of its own."""
        return BalancedDataset(self._inner.repeat(*args, **options), 0)  # nothing is fetched across an epoch's end

    def with_options(self, *args: Any, **options: Any) -> BalancedDataset:
        """The same batches under other options."""
        return BalancedDataset(self._batches.with_options(*args, **options), self._prefetch)

    def shuffle(self, *args: Any, **options: Any) -> BalancedDataset:
        """Refused."""
        raise ValueError(_BATCHES_ARE_FORMED.format("shuffled") + ", or say resize_batches(…, shuffle=True)")

    def batch(self, *args: Any, **options: Any) -> BalancedDataset:
        """Refused."""
        raise ValueError(_BATCHES_ARE_FORMED.format("batched again"))

    def unbatch(self, *args: Any, **options: Any) -> BalancedDataset:
        """Refused."""
        raise ValueError(_BATCHES_ARE_FORMED.format("taken apart"))

    def shard(self, *args: Any, **options: Any) -> BalancedDataset:
        """Refused."""
        raise ValueError("resize_batches has shared the data out among the ranks already: do not shard it once more")


def _tensors(data: Any) -> tuple[Any, int]:
    """The arrays as tensors, and their common length."""
    if isinstance(data, tuple):
        data = tuple(part for part in data if part is not None)  # (x, y, None) is (x, y)
    leaves = tf.nest.flatten(data)
    lengths = set()
    for leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if not shape:  # no array at all, or one of no dimension
            raise TypeError(
                "data must be arrays or tensors with a sample in each row, or a tf.data.Dataset of single samples; got "
                f"{type(leaf).__name__}: turn lists into arrays by np.asarray, and a generator into a dataset by "
                "tf.data.Dataset.from_generator"
            )
        lengths.add(int(shape[0]))
    if len(lengths) != 1:
        raise ValueError(f"all arrays of data must hold equally many samples, got {sorted(lengths)}; cut them alike")
    # Tensors of their own, not constants of the graph, which are limited to two gigabytes and copied.
    with tf.device("CPU:0"):
        tensors = tf.nest.map_structure(lambda a: tf.convert_to_tensor(np.asarray(a) if _pandas(a) else a), data)
    return tensors, lengths.pop()


def _pandas(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] == "pandas"


class _Known:
    """The batches whose sizes are decided, in a variable: a list of lists of indices, flat.

    first number, how many, their places in the rest (one more than there are), all indices
    """

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self._flat = tf.Variable(np.zeros(3, np.int64), shape=[None], trainable=False)

    def show(self, first: int, parts: list[Any]) -> None:
        """These are known, and no others."""
        places = itertools.accumulate(map(len, parts), initial=0)
        flat = np.concatenate([np.array([first, len(parts), *places], np.int64), *parts])
        # Once a round, so not by assign(), whose checks take longer than all the rest.
        tf.raw_ops.AssignVariableOp(resource=self._flat.handle, value=flat)

    def look_up(self, number: tf.Tensor) -> tf.Tensor:
        """The indices of a batch, in the pipeline's graph."""
        flat = tf.identity(self._flat)
        nth, count = number - flat[0], flat[1]
        there = tf.debugging.Assert(tf.logical_and(nth >= 0, nth < count), [TOO_FAR_AHEAD])
        with tf.control_dependencies([there]):
            rest = flat[count + 3 :]
            return rest[flat[nth + 2] : flat[nth + 3]]


def _gather(arrays: Any, known: _Known) -> Callable[[Any], Any]:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def batch(number: tf.Tensor) -> Any:
        indices = known.look_up(number)
        return tf.nest.map_structure(lambda array: tf.gather(array, indices), arrays)

    return cast(Callable[[Any], Any], batch)
