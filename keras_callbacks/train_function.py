"""The train function of ``fit``, wrapped: what happens in Python before and after a round in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_hetero.errors import RoundStateError
from hvd_hetero.measurement.memory_errors import is_out_of_memory
from keras_callbacks.fit_progress import EPOCH_IS_OVER
from keras_callbacks.keras_versions import advanced_variables, names_of, tf_variables, trained_variables
from keras_callbacks.metrics.of_all_ranks import JoinedMetrics, values_of
from keras_callbacks.pipeline.balanced_dataset import BalancedDataset
from keras_callbacks.pipeline.queue import TOO_FAR_AHEAD
from keras_callbacks.session import FitSession
from keras_callbacks.tensorflow_wire import translated


def _use_source(session: FitSession, iterator: Any) -> int | None:
    """Make rounds come from the data that fit iterates over; return their number, if it is known and finite."""
    course = session.course
    source = getattr(iterator, "_dataset", None)  # not a public name: where it is missing, nothing is checked
    if source is None or course.queue is None:
        return None
    if not isinstance(source, BalancedDataset):
        raise RoundStateError(
            f"the batches of this fit do not come from resize_batches, but from {type(source).__name__}. Write "
            "model.fit(resize_batches((x, y), balance), callbacks=[balance]), with map and repeat behind it at "
            "most. Apply filter, cache and other steps to the samples before; to train on less of an epoch, give "
            "fit steps_per_epoch"
        )
    if source.queue.balancer is not session.balancer:
        raise RoundStateError(
            "the batches of this fit were resized for a LoadBalance that is not among its callbacks; write "
            "model.fit(resize_batches((x, y), balance), callbacks=[balance]) with the same balance"
        )
    rounds = int(source.cardinality())
    if not course.steps and rounds == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "the data repeat without end, and fit was not told how long an epoch is: give it steps_per_epoch=…, or "
            "leave repeat() out, since fit begins the data again in every epoch"
        )
    if source.queue.traced != course.queue.traced:
        raise RoundStateError(
            "weight_of or max_micro_batch_cost of this fit's batches differs from that of the latest "
            "resize_batches(…), for which the train step was made. Call resize_batches just before each fit"
        )
    # Which need not be what was resized last.
    source.queue.wanted_epoch = course.queue.wanted_epoch
    course.queue = source.queue
    return rounds if rounds > 0 else None


class RoundFunction:
    """Calls the train function that Keras has made, with the next round prepared, and raises the original error."""

    def __init__(self, session: FitSession, model: Any, function: Callable[[Any], Any], figures: JoinedMetrics) -> None:
        self.session = session
        self.optimizer = model.optimizer
        self.traced = None if session.course.queue is None else session.course.queue.traced
        self._function = function
        self._model = model
        self._figures = figures
        self._iterator: Any = None
        self._left: int | None = None
        self._open = False
        self._of_epoch: dict[str, Any] | None = None

    def __call__(self, iterator: Any) -> Any:
        """Do one round."""
        session, calls, course = self.session, self.session.calls, self.session.course
        if not course.fitting or course.queue is None:
            raise RoundStateError(
                "the optimizer of this model synchronises for a LoadBalance, which is not among the callbacks of this "
                "fit; write callbacks=[balance], or call balance.release() before to train this rank alone"
            )
        if iterator is not self._iterator:
            self._left = _use_source(session, iterator)
        samples = course.queue.prepare(new=iterator is not self._iterator)
        self._iterator = iterator
        if not self._open:
            self._figures.begin()
        # A stand-in must leave no trace: neither in metrics, nor in running statistics or seeds.
        kept = {v._unique_id: (v, v.numpy()) for v in self._marked()} if samples == 0 else {}
        calls.prepare()
        try:
            logs = self._step(iterator)
        except Exception as error:
            failure, calls.host.failure = calls.host.failure, None
            if failure is None:
                ahead = TOO_FAR_AHEAD in str(error)
                failure = RoundStateError(TOO_FAR_AHEAD) if ahead else translated(error, elastic=session.elastic)
            if failure is None:
                if samples <= 1 and isinstance(error, tf.errors.InvalidArgumentError):
                    error.add_note("This rank's batch had one sample, of the first axis; LBBSP(minimum=2) avoids it")
                raise
            raise failure from None
        calls.applied()
        if samples == 0:
            # What every rank advances equally is not put back: a copy that follows the weights would fall behind.
            advanced = set(names_of(self._figures.advanced))
            # What only tracing has found, in the first round, is as the epoch began.
            for variable, value in (self._figures.base() | kept).values():
                if variable._unique_id not in advanced:
                    variable.assign(value)
            logs = {**logs, **{k: v for k, v in self._figures.of_state().items() if k in logs}}
        if calls.stop_agreed:
            self._model.stop_training = True
        unknown = course.queue.rounds is None and course.queue.at_end
        done_before = course.skipped > 0 and course.last_step  # fit counts all steps of the epoch
        if (unknown or done_before) and not calls.stop_agreed:
            self._model.stop_training = EPOCH_IS_OVER
        over = self._model.stop_training is EPOCH_IS_OVER
        if self._left is not None:
            self._left -= 1
        # Data that end before steps_per_epoch end the epoch: Keras warns of that when it asks for more.
        self._open = not (calls.stop_agreed or course.last_step or over or self._left == 0)
        if not self._open:
            self._of_epoch = logs = self._figures.of_all_ranks(logs, calls.samples)
        return logs

    def close_epoch(self) -> dict[str, Any] | None:
        """Return the figures of an epoch that has ended, once."""
        # A rank that stops in the middle of an epoch takes part in one more round, whose table says so to all ranks.
        if self._open and self.session.course.fitting and self._model.stop_training:
            self(self._iterator)
        found, self._of_epoch = self._of_epoch, None
        return found

    def _step(self, iterator: Any) -> Any:
        """Call the train function, and again as often as memory runs short, if the round can be repeated.

        TensorFlow gives up all of a step in which memory runs short, also what earlier micro-batches have gathered. If
        gradients leave once all are gathered, none has left by then. So the whole round is done again.
        """
        calls, figures = self.session.calls, self._figures
        kept = values_of(figures.changed or self._marked()) if calls.micro_batches.repeats else {}
        while True:
            try:
                return self._function(iterator)
            except Exception as error:
                if calls.host.failure is not None or not is_out_of_memory(error) or not calls.begin_again():
                    raise
            # The sums of metrics, running statistics and seeds that the failed step has changed. Tracing, in the first
            # round, finds more of them than were known before it.
            for variable, value in (figures.found | kept).values():
                variable.assign(value)
            iterator = _of_one_batch(calls.micro_batches.batch, iterator.element_spec)

    def _marked(self) -> list[Any]:
        model = self._model
        trained = set(names_of(trained_variables(model)))
        # Also those that Keras 3 does not list: plain variables of TensorFlow.
        plain = [v for v in advanced_variables(model) if v._unique_id not in trained]
        marked = [*self._figures.state(), *tf_variables(model.non_trainable_variables), *plain]
        return list({v._unique_id: v for v in marked}.values())


def _of_one_batch(parts: tuple[Any, ...], spec: Any) -> Any:
    """Return an iterator over this batch alone, of the type that the train function was traced for."""
    batch = tf.nest.pack_sequence_as(spec, list(parts), expand_composites=True)
    return iter(tf.data.Dataset.from_generator(lambda: iter([batch]), output_signature=spec))
