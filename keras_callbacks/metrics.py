"""Metrics over the samples of all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from keras_callbacks import host

if TYPE_CHECKING:
    from keras_callbacks.load_balance import LoadBalance

__all__ = ["global_results", "join_over_ranks", "mean_over_ranks", "state_of"]

logger = logging.getLogger(__name__)


def global_results(balance: LoadBalance, model: Any, close: Callable[[], None]) -> Callable[[], dict[str, Any]]:
    """``model.get_metrics_result``, by which Keras asks for the figures of an epoch and of an evaluation.

    It asks before any callback hears of them, so callbacks agree on all ranks in whatever order they stand. Here the
    figures of an evaluation become those of all ranks; ``close`` sees to those of an epoch that ends before its time.
    """
    local = model.get_metrics_result

    def results() -> dict[str, Any]:
        if tf.executing_eagerly():
            if balance.evaluated:
                balance.evaluated = False
                join_over_ranks(balance, model)
            close()
        found: dict[str, Any] = local()
        return found

    return results


def state_of(model: Any) -> list[tf.Variable]:
    """The variables of all metrics, in an order that all ranks share."""
    return host.plain(v for metric in model.metrics for v in metric.variables)


def join_over_ranks(balance: LoadBalance, model: Any) -> None:
    """Replace the state of each metric by that of one process which has seen the samples of all ranks; one collective.

    Nearly every state is a sum over samples (a total and a count, or counts per threshold), so that of all samples is
    the sum over the ranks; this also holds for metrics that are no means, as precision and AUC are. What Keras marks as
    a mean is averaged, and of maxima and minima (``keras_callbacks.reductions``) the largest or smallest is taken. What
    is none of these becomes rank 0's, and a warning says so.
    """
    variables = state_of(model)
    if not variables:
        return
    joins = [_JOINS["mean" if _is_mean(v) else balance.reductions.get(v._unique_id, "sum")] for v in variables]
    _warn(balance, model)
    values = [v.numpy() for v in variables]
    # Counts are exact in a float64; the sums themselves are of float32. For all but sums every rank has a row.
    parts = [np.asarray(value, dtype=np.float64).ravel() for value in values]
    parts = [part if join is None else _row(part) for part, join in zip(parts, joins, strict=True)]
    summed = hvd.allreduce(tf.constant(np.concatenate(parts)), op=hvd.Sum, name=f"{balance.prefix}.metrics").numpy()
    places = np.cumsum([part.size for part in parts])[:-1]
    for variable, value, part, join in zip(variables, values, np.split(summed, places), joins, strict=True):
        result = part if join is None else join(part.reshape(hvd.size(), -1))
        variable.assign(result.reshape(value.shape).astype(value.dtype))


# What makes one state of the rows of all ranks; None: it is their sum.
_JOINS: dict[str, Callable[[Any], Any] | None] = {
    "sum": None,
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.max(0),
    "min": lambda rows: rows.min(0),
    "unknown": lambda rows: rows[0],
}


def _is_mean(variable: tf.Variable) -> bool:
    return variable.aggregation in (tf.VariableAggregation.MEAN, tf.VariableAggregation.ONLY_FIRST_REPLICA)


def _row(values: Any) -> Any:
    rows = np.zeros((hvd.size(), values.size))
    rows[hvd.rank()] = values
    return rows.ravel()


def _single(metrics: Iterable[Any]) -> Iterator[Any]:
    """Each metric by itself: Keras 3 has those of compile in one."""
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        yield from _single(inner) if inner else [metric]


def _warn(balance: LoadBalance, model: Any) -> None:
    for metric in _single(model.metrics):
        unknown = any(balance.reductions.get(v._unique_id) == "unknown" for v in host.plain(metric.variables))
        if unknown and metric.name not in balance.told_of:
            balance.told_of.add(metric.name)
            logger.warning(
                "metric %r keeps something that is neither a sum over samples nor a maximum or minimum, so the figures "
                "of several ranks cannot be joined: what fit tells of it is rank 0's alone. Keep a total and a count, "
                "as keras.metrics.Mean does, to have it of all samples",
                metric.name,
            )


def mean_over_ranks(logs: dict[str, Any], samples: int, prefix: str) -> dict[str, float]:
    """Figures that belong to no metric, averaged by the samples that each rank had in its latest round."""
    numbers = {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}
    flat = np.array([samples, *(samples * value for value in numbers.values())], dtype=np.float64)
    if samples == 0:
        flat[:] = 0.0  # whatever a stand-in made of them
    total, *sums = hvd.allreduce(tf.constant(flat), op=hvd.Sum, name=f"{prefix}.logs").numpy()
    return {name: float(value / total) for name, value in zip(numbers, sums, strict=True)}
