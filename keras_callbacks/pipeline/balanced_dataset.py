"""The result of ``resize_batches`` for ``fit``: only steps that keep number and order of its batches may follow."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_hetero.errors import RoundStateError
from keras_callbacks.pipeline.queue import RoundQueue

logger = logging.getLogger(__name__)


class BalancedDataset(tf.data.Dataset):  # type: ignore[misc]
    """A dataset of batches that must be read in order, and no further ahead than they are known."""

    def __init__(self, batches: tf.data.Dataset, queue: RoundQueue, prefetch: int) -> None:
        self.queue = queue
        self._batches = batches
        self._prefetch = prefetch
        self._inner = batches.prefetch(prefetch) if prefetch else batches  # behind whatever was mapped
        queue.spec = self._inner.element_spec
        super().__init__(self._inner._variant_tensor)

    def __iter__(self) -> Any:
        """Iterate, but refuse a ``fit`` without the callback."""
        # In an epoch of one batch that would train this rank alone, without an error. Keras takes a first look before
        # it calls any callback, so only the arguments of fit show which there are. To ask for one batch more instead
        # would change the cardinality, and with it repeat() and steps_per_epoch.
        frame = inspect.currentframe()
        while frame is not None and not (frame.f_code.co_name == "fit" and "callbacks" in frame.f_locals):
            frame = frame.f_back
        if frame is not None and frame.f_globals.get("__name__", "").startswith(("keras.src.", "tf_keras.src.")):
            given = frame.f_locals["callbacks"]
            if not any(hasattr(each, "_session") for each in tf.nest.flatten(getattr(given, "callbacks", given))):
                raise RoundStateError(_NO_CALLBACK)
        return super().__iter__()

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._inner]

    @property
    def element_spec(self) -> Any:
        """Types and shapes of an element."""
        return self._inner.element_spec

    def map(self, map_func: Callable[..., Any], *args: Any, **options: Any) -> BalancedDataset:
        """Apply a function to each batch, one after the other, whatever the parallelism in ``options``."""
        return BalancedDataset(self._batches.map(map_func), self.queue, self._prefetch)

    def prefetch(self, *args: Any, **options: Any) -> BalancedDataset:
        """Do nothing: batches are prefetched as far as ``resize_batches(…, prefetch=…)`` says."""
        logger.debug("prefetch after resize_batches does nothing; use resize_batches(…, prefetch=…)")
        return self

    def repeat(self, *args: Any, **options: Any) -> BalancedDataset:
        """Repeat epoch after epoch, each in another order."""
        # Nothing is fetched across an epoch's end.
        return BalancedDataset(self._inner.repeat(*args, **options), self.queue, 0)

    def with_options(self, *args: Any, **options: Any) -> BalancedDataset:
        """Return the same batches under other options."""
        return BalancedDataset(self._batches.with_options(*args, **options), self.queue, self._prefetch)


_NO_CALLBACK = (
    "callbacks of this fit have no LoadBalance, so each rank would train alone. Write model.fit(batches, "
    "callbacks=[balance]) for batches of resize_batches"
)


def _is_resized(data: Any) -> bool:
    """Return whether data come from `resize_batches`, perhaps through steps such as ``take``."""
    if isinstance(data, BalancedDataset):
        return True
    return isinstance(data, tf.data.Dataset) and any(map(_is_resized, data._inputs()))


def refuses_resized(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``model.evaluate`` or ``predict``, but refusing batches whose sizes follow the training's plan."""

    @functools.wraps(evaluate)
    def checked(x: Any = None, *args: Any, **options: Any) -> Any:
        if _is_resized(x):
            raise ValueError(
                "validation_data, or data to evaluate or predict on, must not come from resize_batches, whose "
                "batches follow the rounds of training. Write validation_batches(data, balance), or to predict give "
                "each rank its part in plain batches: samples.shard(size, rank).batch(…)"
            )
        return evaluate(x, *args, **options)

    return checked
