"""A round that does not fit in this rank's memory: it is done again, in smaller micro-batches.

TensorFlow gives up all of a step in which memory runs short, also what earlier micro-batches have gathered. If
gradients leave once all are gathered, none has left by then. So the whole round is done again, on the same batch; what
the failed step has changed (sums of metrics, running statistics, seeds) is put back first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_hetero.measurement.memory_errors import is_out_of_memory
from keras_callbacks.metrics.of_all_ranks import Values, values_of
from keras_callbacks.step.calls import RoundCalls


class MemoryShortage:
    """The rounds of one rank that run out of memory.

    ``changed`` returns what a step may change before it fails. ``found`` returns the part that its latest tracing has
    found, with the values at that time, for a step that was traced after ``changed`` was called.
    """

    def __init__(
        self, calls: RoundCalls, changed: Callable[[], list[tf.Variable]], found: Callable[[], Values] = dict
    ) -> None:
        self._calls = calls
        self._changed = changed
        self._found = found

    def survived(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Call the train function, and again as often as memory runs short, if it can be repeated."""
        calls = self._calls
        kept = values_of(self._changed()) if calls.micro_batches.repeats else {}
        while True:
            try:
                return function(iterator)
            except Exception as error:
                if calls.host.failure is not None or not is_out_of_memory(error) or not calls.begin_again():
                    raise
            for variable, value in (self._found() | kept).values():
                variable.assign(value)
            iterator = _of_one_batch(calls.micro_batches.batch, iterator.element_spec)


def _of_one_batch(parts: tuple[Any, ...], spec: Any) -> Any:
    """Return an iterator over this batch alone, of the type that the train function was traced for."""
    batch = tf.nest.pack_sequence_as(spec, list(parts), expand_composites=True)
    return iter(tf.data.Dataset.from_generator(lambda: iter([batch]), output_signature=spec))
