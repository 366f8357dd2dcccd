"""The weight of a micro-batch's gradient in that of the round: its samples, or what its mean loss is over.

A loss of ``compile`` is a sum over elements, S, divided by a count, D: of all elements, of those that no mask hides, or
of their weights (``mean_with_sample_weight``). With S_ij and D_ij of micro-batch j of rank i, one process has

    S / D  =  Σ S_ij / Σ D_ij  =  Σ (D_ij / D) (S_ij / D_ij),

so a micro-batch weighs D_ij. Where all elements count, D_ij is in proportion to its n_ij samples, which weigh instead.
What is added to the losses of ``compile``, as regularisation is, counts once either way, since weights add up to 1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_callbacks.keras_versions import as_keras_converts, without_autograph
from keras_callbacks.pipeline.sources import number_from

logger = logging.getLogger(__name__)

_SUMS = ("sum", "none", None)  # reductions of a loss that divide by nothing


class Weights:
    """The weights of a training's micro-batches, while its train step is traced.

    ``weight_of`` is the user's function; ``common`` computes `common_count` in the graph; ``logs`` is true on the rank
    that warns.
    """

    def __init__(
        self,
        weight_of: Callable[..., Any] | None = None,
        common: Callable[[tf.Tensor], tf.Tensor] | None = None,
        *,
        logs: bool = False,
    ) -> None:
        self._weight_of = weight_of
        self._common = common
        self._unsaid = {_INSIDE, _OWN_CALL} if logs else set()
        self._share: tf.Tensor | None = None  # by samples; None outside of a round
        self._given: tf.Tensor | None = None
        self._counts: list[tf.Tensor | None] = []  # of each loss, what it divides by; None: as many as samples, or 1

    def begin(self, batch: Any, share: tf.Tensor) -> None:
        """Begin a micro-batch that has this share of the round's samples."""
        self._share, self._counts = share, []
        self._given = None if self._weight_of is None else number_from("weight_of", self._weight_of, batch)

    def end(self) -> None:
        """End a micro-batch: losses that follow are an evaluation's."""
        self._share = None

    def weight(self) -> tf.Tensor | None:
        """Return the micro-batch's weight, as far as its step has computed it; None: its samples."""
        if self._share is None:
            return None
        found = [count for count in self._counts if count is not None]
        weight = self._given
        if weight is None and found:
            inside = not tf.executing_eagerly() and found[0].graph is not tf.compat.v1.get_default_graph()
            if inside:
                self._warn(_INSIDE)
                return None
            if len(found) < len(self._counts):
                raise ValueError(_APART)
            # One weight serves several losses only if all divide by the same. Weighted by samples, losses of several
            # outputs with one mask were 1e-4 to 7e-3 apart from one process after eight rounds.
            weight = found[0] if len(found) == 1 or self._common is None else self._common(tf.stack(found))
        # A stand-in counts for nothing, whatever its batch holds.
        return weight if weight is None else tf.math.multiply_no_nan(tf.stop_gradient(weight), tf.sign(self._share))

    def of_loss(self, loss: Any) -> Any:
        """Return a loss of ``compile``, wrapped to note what it divides by."""
        if type(loss).__call__ is tf.keras.losses.Loss.__call__:
            return _CountedLoss(loss, self._count)
        if self._weight_of is None and hasattr(loss, "reduction"):
            self._warn(_OWN_CALL, type(loss).__name__)
        return loss

    def _warn(self, message: str, *values: str) -> None:
        """Log the warning, the first time."""
        if message in self._unsaid:
            self._unsaid.remove(message)
            logger.warning(message, *values)

    def _count(self, value: Any, sums: bool, divisor: Callable[[], tf.Tensor | None]) -> Any:
        """Note what a loss of this value divides by, and return the value to train on."""
        if self._share is None or self._given is not None:
            return value
        self._counts.append(None if sums else divisor())
        if sums:
            # A loss that only sums has no D: this takes out the weight n_ij / X, which its gradient will get.
            return value * tf.cast(tf.math.divide_no_nan(tf.ones([], tf.float64), self._share), value.dtype)
        if self._counts[-1] is None:
            return value
        # A batch that is masked whole divides 0 by 0 in tf_keras, and trainings ended with NaN.
        return tf.math.multiply_no_nan(value, tf.cast(tf.sign(self._counts[-1]), value.dtype))


class _CountedLoss:
    """A loss of ``compile`` that passes its value through ``count``, with what it divides by."""

    def __init__(self, plain: Any, count: Callable[..., Any]) -> None:
        self.plain = plain
        self._count = count

    def __getattr__(self, name: str) -> Any:
        if name == "plain":  # not set yet, as in a copy
            raise AttributeError(name)
        return getattr(self.plain, name)  # its reduction, and whatever else Keras asks for

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        plain, losses = self.plain, []

        def call(*arguments: Any) -> Any:
            losses.append(as_keras_converts(plain.call)(*arguments))
            return losses[-1]

        # D is asked of the loss itself: the same sum, over ones instead of losses.
        def ones(*_: Any) -> Any:
            found = tf.ones_like(losses[-1])
            found._keras_mask = getattr(losses[-1], "_keras_mask", None)
            return found

        def over_ones(reduction: str, weights: Any) -> tf.Tensor:
            return tf.cast(_like(plain, ones, reduction=reduction)(y_true, y_pred, weights), tf.float64)

        def divisor() -> tf.Tensor | None:
            if plain.reduction == "mean_with_sample_weight" and sample_weight is not None:
                return tf.math.divide_no_nan(over_ones("sum", sample_weight), over_ones(plain.reduction, sample_weight))
            masks = (getattr(tensor, "_keras_mask", None) for tensor in (y_pred, losses[-1]))
            return None if all(mask is None for mask in masks) else over_ones("sum", None)

        value = _like(plain, call)(y_true, y_pred, sample_weight)
        return self._count(value, plain.reduction in _SUMS, divisor)


def common_count(counts: npt.NDArray[np.float64]) -> float:
    """Return what all losses divide by; refuse losses that divide by different counts."""
    if not np.allclose(counts, counts[0], rtol=1e-6, atol=0.0):
        raise ValueError(_APART)
    return float(counts[0])


def _like(loss: Any, call: Callable[..., Any], **attributes: Any) -> Any:
    """Return a copy of the loss with another ``call``."""
    # Not by ``copy``, for which Keras 3 would save it to a file.
    other = object.__new__(type(loss))
    other.__dict__.update(vars(loss), call=without_autograph(call), **attributes)
    return other


_APART = (
    "several losses divide by different counts, because masks or sample weights differ, so one weight cannot serve "
    "them all. Write them as losses of reduction='sum', with loss_weights of 1 / (a typical count). Or give "
    "resize_batches(…, weight_of=…) what all of them divide by"
)
_INSIDE = (
    "a loss in a tf.function of train_step's own divides by what masks leave of its elements, or by sample weights. "
    "Gradients are weighted by samples, so the result depends on the split. Give resize_batches(…, weight_of=…), or "
    "losses of reduction='sum'"
)
_OWN_CALL = (
    "loss %s overrides __call__, so what it divides by is not known, and gradients are weighted by samples. If it sums "
    "or masks hide elements, the result depends on the split. Override call(y_true, y_pred) instead, or give "
    "resize_batches(…, weight_of=…) what its mean is over"
)
