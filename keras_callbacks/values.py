"""Values of variables, kept to be put back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import tensorflow as tf

__all__ = ["Values", "values_of"]

Values: TypeAlias = dict[str, tuple[tf.Variable, tf.Tensor]]
"""Variables and their values, by the variables' identity."""


def values_of(variables: Iterable[tf.Variable]) -> Values:
    """Return the values as they are: one is copied only once its variable changes.

    To ask for one takes 10 to 15 microseconds of a processor: 0.7 ms for a model with 20 normalisations, of 12 ms that
    a step of it took.
    """
    return {v._unique_id: (v, tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype)) for v in variables}
