"""Metrics over the samples of all ranks.

Ranks exchange the variables of every metric, which are joined to those that one process would have. The step's own
function (``keras_callbacks.metrics.traced_step``) then computes its figures from the joined variables.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from keras_callbacks.keras_versions import (
    advanced_variables,
    loss_totals,
    metrics_state,
    names_of,
    optimizer_variables,
    spectral_vectors,
    tf_variables,
    trained_variables,
)
from keras_callbacks.metrics.traced_step import (
    Figures,
    Update,
    figures_in,
    independent_of_the_batch,
    updates_in,
    variables_of,
    weigh,
)
from keras_callbacks.tensorflow_wire import TensorFlowWire

logger = logging.getLogger(__name__)

Values: TypeAlias = dict[str, tuple[tf.Variable, tf.Tensor]]
"""Variables and their values, by the variables' identity."""


class JoinedMetrics:
    """The figures that steps of training or evaluation return, and how those of all ranks' samples are made of them.

    ``gathers``: the traced step is one micro-batch of several. ``warned``: figures that were warned of already.
    """

    def __init__(self, model: Any, wire: TensorFlowWire, prefix: str, *, gathers: bool, warned: set[str]) -> None:
        self._model = model
        self._wire = wire
        self._name = f"{prefix}.metrics"
        self._gathers = gathers
        self._warned = warned
        self._local: Callable[[], dict[str, Any]] = model.get_metrics_result
        self._figures = Figures()
        self._names: set[str] = set()
        self._updates: dict[str, Update] = {}
        self._base: dict[str, Any] = {}
        self.found: Values = {}
        """Values, before the step, of what the traced step changes besides weights and the optimizer's state."""
        self.advanced: list[tf.Variable] = []
        """Variables that the step advances, alike on all ranks: a copy that follows the weights, a count of steps."""
        self.in_step = False
        """True while a step runs."""
        # Sums that are means over rounds, by what micro-batches count, and whether a round counts by its samples.
        self._of_rounds: list[tuple[tf.Variable, bool]] = []

    def observed(
        self,
        step: Callable[[Any], Any],
        data: Any,
        shares: Callable[[], tuple[tf.Tensor, tf.Tensor]] | None = None,
        *,
        again: bool = False,
    ) -> Any:
        """Return the step's logs for these data, with the step's effect on sums that count batches weighted.

        ``shares`` returns, after the step, its fraction of means over the round, and its fraction of the samples.
        ``again``: the step has been traced for this round already.
        """
        self.in_step = True
        logs = step(data)
        self.in_step = False
        if tf.executing_eagerly() or not isinstance(logs, dict):
            return logs
        logs = tf.nest.map_structure(lambda value: None if value is None else tf.identity(value), logs)
        graph = tf.compat.v1.get_default_graph()
        known = [*self.state(), *tf_variables(self._model.weights), *optimizer_variables(self._model.optimizer)]
        handles = variables_of(graph, known)
        updates = updates_in(graph, handles)
        if not again:
            self._note(graph, logs, handles, updates)
        if shares is not None:
            counted, of_samples = shares()
            per_batch = self._per_batch(updates)
            weigh(per_batch, counted)
            # Keras's mean of the loss is over samples, so its sum needs the one fraction in the place of the other.
            if counted is not of_samples:
                of_losses = set(names_of(loss_totals(self._model))) - {u.variable._unique_id for u in per_batch}
                totals = [updates[v] for v in of_losses & updates.keys()]
                weigh(totals, tf.math.divide_no_nan(counted, of_samples))
                self._of_rounds = [(u.variable, False) for u in per_batch] + [(u.variable, True) for u in totals]
        return logs

    def read(self) -> dict[str, tf.Tensor]:
        """Return the present state, in the graph that is traced, and begin a round of several micro-batches."""
        self._of_rounds = []
        return {v._unique_id: v.read_value() for v in [*self.state(), *loss_totals(self._model)]}

    def correct(self, before: Mapping[str, tf.Tensor], factor: tf.Tensor, samples_done: tf.Tensor) -> None:
        """Multiply what a round has added to means over rounds by the factor from its planned weight to its own.

        ``samples_done`` is the factor from its planned samples to its own.
        """
        for variable, by_samples in self._of_rounds:
            if (value := before.get(variable._unique_id)) is not None:
                by = factor * samples_done if by_samples else factor
                variable.assign(value + (variable - value) * tf.cast(by, value.dtype))

    @property
    def changed(self) -> list[tf.Variable]:
        """Variables that the traced step assigns to: metrics, running statistics, seeds."""
        return [update.variable for update in self._updates.values()]

    def begin(self) -> None:
        """Begin an epoch, or an evaluation, with the present state, which is the same on all ranks."""
        self._base = {v._unique_id: v.numpy() for v in self.state()}

    def state(self) -> list[tf.Variable]:
        """Return the variables of all metrics: the model's, and those behind a step's figures; alike on all ranks."""
        found = {v._unique_id: v for v in tf_variables(v for metric in self._model.metrics for v in metric.variables)}
        for variables in self._figures.of_state.values():
            found |= {v._unique_id: v for v in variables if v._unique_id not in found}
        return list(found.values())

    def base(self) -> dict[str, tuple[tf.Variable, Any]]:
        """Return the variables of the state with their values at the beginning of the epoch."""
        return {v._unique_id: (v, self._base[v._unique_id]) for v in self.state() if v._unique_id in self._base}

    def of_state(self) -> dict[str, Any]:
        """Return the figures computed from the present state."""
        return self._local() if not self._names or self._as_keras_says() else self._figures.compute()

    def _as_keras_says(self) -> bool:
        """Return whether Keras takes the model's metrics for the step's figures: if names are the same."""
        return bool(self._local().keys() == self._names)

    def is_of_the_batch(self, name: str) -> bool:
        """Return whether a figure belongs only to the latest batch."""
        return bool(self._names) and name not in self._figures.of_state

    def of_all_ranks(self, logs: dict[str, Any], samples: int) -> dict[str, Any]:
        """Join the state of all ranks, and return its figures; one collective.

        Nearly every state is a sum over samples (a total and a count, or counts per threshold). Any state that is no
        sum, mean, maximum or minimum becomes rank 0's, with a warning. Figures of the latest batch are averaged.
        """
        if not self._names:  # an eager step may tell compile's metrics in a dictionary of their own
            inner = {name: v for entry in logs.values() if isinstance(entry, dict) for name, v in entry.items()}
            logs = {name: value for name, value in logs.items() if not isinstance(value, dict)} | inner
        names = self._names or set(logs)
        of_batch = sorted(names - self.of_state().keys())
        batch = {name: logs[name] for name in of_batch if name in logs and _is_number(logs[name])}
        self._warn()
        variables = self.state()
        mine = [v.numpy() for v in variables], [np.asarray(value) for value in batch.values()], samples
        states, batches, counts = zip(*self._wire.allgather_object(mine, self._name), strict=True)
        for variable, *values in zip(variables, *states, strict=True):
            # Counts are exact in a float64; the sums themselves are of float32.
            base = np.asarray(self._base.get(variable._unique_id, 0), np.float64)
            joined = _JOINS[self._reduction(variable)](np.stack(values).astype(np.float64), base)
            variable.assign(joined.astype(values[0].dtype))
        self._base = {}
        # By samples: the figures of a stand-in come from no data, and may be NaN.
        weights = [count / max(sum(counts), 1) for count in counts]
        means = {
            name: sum(np.float64(w) * v if w else np.zeros_like(v) for w, v in zip(weights, values, strict=True))
            for name, *values in zip(batch, *batches, strict=True)
        }
        return {**logs, **means, **{k: v for k, v in self.of_state().items() if k in names}}

    def _note(
        self, graph: Any, logs: dict[str, Any], handles: dict[str, tf.Variable], updates: dict[str, Update]
    ) -> None:
        model = self._model
        metrics = metrics_state(model)
        others = {v._unique_id: v for v in [*tf_variables(model.weights), *optimizer_variables(model.optimizer)]}
        for v in metrics:
            others.pop(v._unique_id, None)
        self._figures = figures_in(graph, logs, handles, updates, others.values(), metrics)
        self._names = set(logs)
        self._updates = updates
        trained = trained_variables(model)
        # If micro-batches are gathered, the traced step has no update, and what it trains might be advanced, too.
        apart = set() if self._gathers else set(names_of(trained))
        candidates = [v for v in advanced_variables(model) if v._unique_id not in apart]
        same_on_all_ranks = [*trained, *optimizer_variables(model.optimizer)]
        # A stock layer's work in a branch is not seen.
        self.advanced = [
            *independent_of_the_batch(graph, handles, updates, candidates, same_on_all_ranks),
            *spectral_vectors(model),
        ]
        with tf.init_scope():
            # Variables that the step makes are traced twice before it runs, and have no value the first time.
            new = [v for v in self.state() if v._unique_id not in self._base and _has_value(v)]
            self._base |= {v._unique_id: v.numpy() for v in new}
            changed = [update.variable for update in updates.values()]
            self.found = values_of(v for v in changed if v._unique_id not in others and _has_value(v))

    def _groups(self) -> dict[str, list[tf.Variable]]:
        """Return the state of each metric; for state of none of the model's metrics, that behind each figure."""
        groups = {f"metric {m.name!r}": tf_variables(m.variables) for m in _single(self._model.metrics)}
        known = {v._unique_id for group in groups.values() for v in group}
        for name, variables in self._figures.of_state.items():
            groups[f"figure {name!r}"] = [v for v in variables if v._unique_id not in known]
        return groups

    def _per_batch(self, updates: dict[str, Update]) -> list[Update]:
        """Return the sums that count batches, and those that are divided by them: the others of the same metric."""
        found: dict[str, Update] = {}
        advanced = set(names_of(self.advanced))  # such as counters by which the step goes on
        for group in self._groups().values():
            of_group = [updates[v._unique_id] for v in group if v._unique_id in updates.keys() - advanced]
            if any(update.counts_batches for update in of_group):
                found |= {
                    u.variable._unique_id: u for u in of_group if u.kind == "sum" and u.variable.dtype.is_floating
                }
        return list(found.values())

    def _reduction(self, variable: tf.Variable) -> str:
        if variable._unique_id in names_of(self.advanced):
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
            if name not in self._warned and any(self._reduction(v) == "unknown" for v in group):
                self._warned.add(name)
                logger.warning(
                    "the state of %s is neither a sum over samples nor a maximum or minimum, so it cannot be "
                    "combined over ranks, and fit reports rank 0's figure. Keep a total and a count instead, as "
                    "keras.metrics.Mean does",
                    name,
                )
        for name in self._figures.partly_of_state:
            if name not in self._warned and not self._as_keras_says():
                self._warned.add(name)
                logger.warning(
                    "figure %r is made of more than a metric's state, or in a tf.function or branch of its own. So "
                    "it cannot be computed from the state of all ranks, and fit reports the mean of the ranks' "
                    "figures. Update the metric in train_step itself, and return metric.result() unchanged",
                    name,
                )


class Evaluation:
    """The figures of an evaluation, complete after its last step; before, they cover this rank alone.

    ``meet`` meets the other ranks at its end, and takes whether this one had a batch.
    """

    def __init__(self, figures: JoinedMetrics, meet: Callable[[bool], object]) -> None:
        self._figures = figures
        self._meet = meet
        self._logs: dict[str, Any] | None = None
        self._met = False

    def ends(self) -> None:
        """End an evaluation. If it had no step, send that to the other ranks."""
        met, self._met = self._met, False
        if not met:
            self._meet(False)

    def step_begins(self, step: int) -> None:
        """Begin an evaluation at step 0, else go on with it. Data of unknown length end in a step that never ends."""
        if step == 0:
            self._logs = None
            self._figures.begin()

    def step_ends(self, logs: Mapping[str, Any]) -> None:
        """Keep the step's logs: it may have been the last step."""
        self._logs = dict(logs)

    def close(self) -> dict[str, Any] | None:
        """Return the figures of an evaluation that has ended, once; then this is a collective call."""
        if self._figures.in_step:  # a step asks for the figures so far
            return None
        logs, self._logs = self._logs, None
        if logs is None:
            return None
        self._met = True
        self._meet(True)
        return self._figures.of_all_ranks(logs, 1)


def values_of(variables: Iterable[tf.Variable]) -> Values:
    """Return the present values of variables."""
    # Takes 10 to 15 microseconds each: a value is copied only once its variable changes.
    return {v._unique_id: (v, tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype)) for v in variables}


def global_results(
    local: Callable[[], dict[str, Any]], *close: Callable[[], dict[str, Any] | None]
) -> Callable[[], dict[str, Any]]:
    """Return a ``model.get_metrics_result``, by which Keras asks for the figures of an epoch and of an evaluation.

    Each ``close`` returns the figures of an evaluation or an epoch that has ended, or None.
    """
    # Keras asks before any callback gets the figures, so callbacks agree on all ranks in whatever order they stand. It
    # takes the answer if that has the names of the last step's figures, and the last step's figures otherwise.

    def results() -> dict[str, Any]:
        for each in close if tf.executing_eagerly() else ():
            if (found := each()) is not None:
                return found
        return local()

    return results


# How the states of all ranks, which have all begun at the same ``base``, make one.
_JOINS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda states, base: base + (states - base).sum(0),
    "mean": lambda states, _: states.mean(0),
    "max": lambda states, _: states.max(0),
    "min": lambda states, _: states.min(0),
    "unknown": lambda states, _: states[0],
}


def _has_value(variable: tf.Variable) -> bool:
    return bool(tf.raw_ops.VarIsInitializedOp(resource=variable.handle))


def _is_number(value: Any) -> bool:
    return not isinstance(value, dict | list | tuple) and bool(np.issubdtype(np.asarray(value).dtype, np.number))


def _single(metrics: Iterable[Any]) -> Iterator[Any]:
    """Yield each metric by itself: Keras 3 has compile's in one."""
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        yield from _single(inner) if inner else [metric]
