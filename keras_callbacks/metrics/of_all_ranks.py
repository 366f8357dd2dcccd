"""Metrics over the samples of all ranks.

What travels is state: the variables of every metric, which are joined so that they are those of one process which has
seen the samples of all ranks. What a step tells of the joined state is then told by the step's own function of it
(``keras_callbacks.metrics.figures``), under whatever names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from keras_callbacks import keras_versions
from keras_callbacks.metrics.figures import Told
from keras_callbacks.metrics.reductions import Update, of_no_batch, updates_in, variables_of, weigh

if TYPE_CHECKING:
    from keras_callbacks.load_balance import LoadBalance

__all__ = ["Figures", "global_results"]

logger = logging.getLogger(__name__)


class Figures:
    """What the steps of a training, or of evaluations, tell, and how that becomes a figure of all ranks' samples."""

    def __init__(self, balance: LoadBalance, model: Any) -> None:
        self._balance = balance
        self._model = model
        self._local: Callable[[], dict[str, Any]] = model.get_metrics_result
        self._told: Told | None = None
        self._names: set[str] = set()
        self._updates: dict[str, Update] = {}
        self._base: dict[str, Any] = {}
        self.advanced: list[tf.Variable] = []
        """What the step advances by itself, alike on all ranks: a copy that follows the weights, a count of steps."""

    def observed(
        self, step: Callable[[Any], Any], data: Any, weight: tf.Tensor | None = None, *, again: bool = False
    ) -> Any:
        """What the step tells of these data; sums that count batches grow by ``weight`` times what the step adds.

        ``again``: the step has been traced for this round already.
        """
        logs = step(data)
        if tf.executing_eagerly() or not isinstance(logs, dict):
            return logs
        logs = tf.nest.map_structure(lambda value: None if value is None else tf.identity(value), logs)
        graph = tf.compat.v1.get_default_graph()
        known = [
            *self.state(),
            *keras_versions.plain(self._model.weights),
            *keras_versions.optimizer_variables(self._model.optimizer),
        ]
        handles = variables_of(graph, known)
        updates = updates_in(graph, handles)
        if not again:
            self._note(graph, logs, handles, updates)
        if weight is not None:
            weigh(self._per_batch(updates), weight)
        return logs

    def begin(self) -> None:
        """An epoch, or an evaluation, begins with the state as it is: the same on all ranks."""
        self._base = {v._unique_id: v.numpy() for v in self.state()}

    def state(self) -> list[tf.Variable]:
        """The variables of all metrics: of the model's, and of those that a step tells of; alike on all ranks."""
        found = {
            v._unique_id: v for v in keras_versions.plain(v for metric in self._model.metrics for v in metric.variables)
        }
        for variables in self._told.state.values() if self._told else ():
            found |= {v._unique_id: v for v in variables if v._unique_id not in found}
        return list(found.values())

    def base(self) -> dict[str, tuple[tf.Variable, Any]]:
        """The state as the epoch began."""
        return {v._unique_id: (v, self._base[v._unique_id]) for v in self.state() if v._unique_id in self._base}

    def of_state(self) -> dict[str, Any]:
        """The figures that the state makes, as it is."""
        return self._local() if self._told is None or self._as_keras_says() else self._told.compute()

    def _as_keras_says(self) -> bool:
        """Whether Keras takes the model's metrics for what the step tells: where names are the same."""
        return bool(self._local().keys() == self._names)

    def is_of_the_batch(self, name: str) -> bool:
        """Whether a figure is of the latest batch alone."""
        return self._told is not None and name not in self._told.state

    def of_all_ranks(self, logs: dict[str, Any], samples: int) -> dict[str, Any]:
        """Join the state of all ranks, and return the figures that it makes; one collective.

        Nearly every state is a sum over samples (a total and a count, or counts per threshold), so that of all samples
        is the sum over the ranks; this also holds for metrics that are no means, as precision and AUC are. What Keras
        marks as a mean is averaged, and of maxima and minima the largest or smallest is taken. What is none of these
        becomes rank 0's, and a warning says so. Figures of the latest batch are averaged by the ``samples`` in it.
        """
        names = self._names or set(logs)
        if self._told is None or self._as_keras_says():
            of_batch = names - self._local().keys()
        else:
            of_batch = names - self._told.state.keys()
        batch = {name: logs[name] for name in sorted(of_batch) if name in logs and _is_number(logs[name])}
        self._warn()
        variables = self.state()
        values = [v.numpy() for v in variables]
        joins = [_JOINS[self._reduction(v)] for v in variables]
        # Counts are exact in a float64; the sums themselves are of float32. For all but sums every rank has a row.
        parts = [
            _flat(value - self._base.get(v._unique_id, 0)) if join is None else _row(_flat(value))
            for v, value, join in zip(variables, values, joins, strict=True)
        ]
        # Whatever a stand-in has made of its figures, it has made it of nothing.
        parts += [_flat(value) * samples if samples else np.zeros_like(_flat(value)) for value in batch.values()]
        parts.append(np.array([samples], dtype=np.float64))
        name = f"{self._balance.prefix}.metrics"
        summed = hvd.allreduce(tf.constant(np.concatenate(parts)), op=hvd.Sum, name=name).numpy()
        joined = np.split(summed, np.cumsum([part.size for part in parts])[:-1])
        for variable, value, join in zip(variables, values, joins, strict=True):
            part = joined.pop(0)
            result = part if join is not None else part + _flat(self._base.get(variable._unique_id, 0))
            result = result if join is None else join(result.reshape(hvd.size(), -1))
            variable.assign(result.reshape(value.shape).astype(value.dtype))
        self._base = {}
        total = max(float(joined[-1][0]), 1.0)
        means = {
            name: (part / total).reshape(np.shape(value))[()]
            for (name, value), part in zip(batch.items(), joined, strict=False)
        }
        return {**logs, **means, **{k: v for k, v in self.of_state().items() if k in names}}

    def _note(
        self, graph: Any, logs: dict[str, Any], handles: dict[str, tf.Variable], updates: dict[str, Update]
    ) -> None:
        model = self._model
        metrics = keras_versions.plain(
            v for metric in model.metrics for v in metric.variables
        ) + keras_versions.tracked_state(model)
        others = {
            v._unique_id: v
            for v in [*keras_versions.plain(model.weights), *keras_versions.optimizer_variables(model.optimizer)]
        }
        for v in metrics:
            others.pop(v._unique_id, None)
        self._told = Told(graph, logs, handles, updates, others.values(), metrics)
        self._names = set(logs)
        self._updates = updates
        trained = keras_versions.trained_variables(model)
        # Where micro-batches are gathered, the step as traced has no update, and what it trains might be advanced, too.
        apart = set() if self._balance.policy.accumulates else set(keras_versions.names_of(trained))
        candidates = [v for v in keras_versions.advanced_variables(model) if v._unique_id not in apart]
        alike = [*trained, *keras_versions.optimizer_variables(model.optimizer)]
        # Of what a stock layer does in a branch nothing is seen.
        self.advanced = [
            *of_no_batch(graph, handles, updates, candidates, alike),
            *keras_versions.spectral_vectors(model),
        ]
        with tf.init_scope():
            new = [v for v in self.state() if v._unique_id not in self._base]
            self._base |= {v._unique_id: v.numpy() for v in new if tf.raw_ops.VarIsInitializedOp(resource=v.handle)}

    def _groups(self) -> dict[str, list[tf.Variable]]:
        """The state of each metric; of what is no metric of the model's, that of each figure that tells of it."""
        groups = {f"metric {m.name!r}": keras_versions.plain(m.variables) for m in _single(self._model.metrics)}
        known = {v._unique_id for group in groups.values() for v in group}
        for name, variables in self._told.state.items() if self._told else ():
            groups[f"what is told as {name!r}"] = [v for v in variables if v._unique_id not in known]
        return groups

    def _per_batch(self, updates: dict[str, Update]) -> list[Update]:
        """The sums that count batches, and those that are divided by them: the others of the same metric."""
        found: dict[str, Update] = {}
        advanced = set(keras_versions.names_of(self.advanced))  # counters, say, by which the step goes on
        for group in self._groups().values():
            of_group = [updates[v._unique_id] for v in group if v._unique_id in updates.keys() - advanced]
            if any(update.counts_batches for update in of_group):
                found |= {
                    u.variable._unique_id: u for u in of_group if u.kind == "sum" and u.variable.dtype.is_floating
                }
        return list(found.values())

    def _reduction(self, variable: tf.Variable) -> str:
        if variable._unique_id in keras_versions.names_of(self.advanced):
            return "mean"  # the same on all ranks
        if variable.aggregation in (tf.VariableAggregation.MEAN, tf.VariableAggregation.ONLY_FIRST_REPLICA):
            return "mean"
        update = self._updates.get(variable._unique_id)
        if update is None:
            return "sum"
        # A whole number of batches cannot be shared among the ranks of a round.
        return "unknown" if update.counts_batches and not variable.dtype.is_floating else update.kind

    def _warn(self) -> None:
        for name, group in self._groups().items():
            if name not in self._balance.warned and any(self._reduction(v) == "unknown" for v in group):
                self._balance.warned.add(name)
                logger.warning(
                    "%s keeps something that is neither a sum over samples nor a maximum or minimum, so the figures of "
                    "several ranks cannot be joined: what fit tells of it is rank 0's alone. Keep a total and a count, "
                    "as keras.metrics.Mean does, to have it of all samples",
                    name,
                )
        for name in self._told.mixed if self._told else ():
            if name not in self._balance.warned and not self._as_keras_says():
                self._balance.warned.add(name)
                logger.warning(
                    "the step makes %r of a metric and of something else, or in a tf.function or branch of its own, so "
                    "it cannot be computed anew from the state of all ranks: what fit tells of it is the mean of the "
                    "ranks'. Update the metric in train_step itself, and tell metric.result() as it is afterwards, to "
                    "have it of all samples",
                    name,
                )


def global_results(
    balance: LoadBalance, model: Any, tests: Figures, close: Callable[[], dict[str, Any] | None]
) -> Callable[[], dict[str, Any]]:
    """``model.get_metrics_result``, by which Keras asks for the figures of an epoch and of an evaluation.

    It asks before any callback hears of them, so callbacks agree on all ranks in whatever order they stand. Keras takes
    the answer if it has the names that the last step has told, and the last step's figures otherwise. ``close`` gives
    the figures of an epoch that has ended, also of one that ends before its time.
    """
    local = model.get_metrics_result

    def results() -> dict[str, Any]:
        found: dict[str, Any] | None = None
        if tf.executing_eagerly():
            if balance.evaluated is not None:
                logs, balance.evaluated = balance.evaluated, None
                found = tests.of_all_ranks(logs, 1)
            else:
                found = close()
        if found is None:
            found = local()
        return found

    return results


# What makes one state of the rows of all ranks; None: it is their sum.
_JOINS: dict[str, Callable[[Any], Any] | None] = {
    "sum": None,
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.max(0),
    "min": lambda rows: rows.min(0),
    "unknown": lambda rows: rows[0],
}


def _flat(value: Any) -> Any:
    return np.asarray(value, dtype=np.float64).ravel()


def _row(values: Any) -> Any:
    rows = np.zeros((hvd.size(), values.size))
    rows[hvd.rank()] = values
    return rows.ravel()


def _is_number(value: Any) -> bool:
    return not isinstance(value, dict | list | tuple) and bool(np.issubdtype(np.asarray(value).dtype, np.number))


def _single(metrics: Iterable[Any]) -> Iterator[Any]:
    """Each metric by itself: Keras 3 has those of compile in one."""
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        yield from _single(inner) if inner else [metric]
