"""Metrics over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from keras_callbacks import host

if TYPE_CHECKING:
    from keras_callbacks.load_balance import LoadBalance

__all__ = ["global_results", "mean_over_ranks", "state_of", "sum_over_ranks"]


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
                sum_over_ranks(state_of(model), balance.prefix)
            close()
        found: dict[str, Any] = local()
        return found

    return results


def state_of(model: Any) -> list[tf.Variable]:
    """The variables of all metrics, in an order that all ranks share."""
    return host.plain(v for metric in model.metrics for v in metric.variables)


def sum_over_ranks(variables: list[tf.Variable], prefix: str) -> None:
    """Replace each variable of a metric by its sum over all ranks, in one collective.

    A metric's state is a sum over samples (a total and a count, or counts per threshold), so the sum of the states is
    the state of one process that has seen all samples. That also holds for metrics that are no means, as precision
    and AUC are. What Keras marks as a mean is averaged.
    """
    if not variables:
        return
    values = [v.numpy() for v in variables]
    # Counts are exact in a float64; the sums themselves are of float32.
    flat = np.concatenate([np.asarray(value, dtype=np.float64).ravel() for value in values])
    summed = hvd.allreduce(tf.constant(flat), op=hvd.Sum, name=f"{prefix}.metrics").numpy()
    places = np.cumsum([value.size for value in values])[:-1]
    for variable, value, part in zip(variables, values, np.split(summed, places), strict=True):
        mean = variable.aggregation in (tf.VariableAggregation.MEAN, tf.VariableAggregation.ONLY_FIRST_REPLICA)
        result = part / hvd.size() if mean else part
        variable.assign(result.reshape(value.shape).astype(value.dtype))


def mean_over_ranks(logs: dict[str, Any], samples: int, prefix: str) -> dict[str, float]:
    """Figures that belong to no metric, averaged by the samples that each rank had in its latest round."""
    numbers = {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}
    flat = np.array([samples, *(samples * value for value in numbers.values())], dtype=np.float64)
    if samples == 0:
        flat[:] = 0.0  # whatever a stand-in made of them
    total, *sums = hvd.allreduce(tf.constant(flat), op=hvd.Sum, name=f"{prefix}.logs").numpy()
    return {name: float(value / total) for name, value in zip(numbers, sums, strict=True)}
