"""Scalars for TensorBoard, by the writer of the framework that trains."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvd_hetero.telemetry.exports.named_numbers import figures, require
from hvd_hetero.telemetry.records import Record


class TensorBoard:
    """Write the figures of each round as scalars under ``hvd_hetero/``; the step is the number of the round.

    It writes by ``torch.utils.tensorboard`` if PyTorch is imported, else by ``tf.summary``. Both need the package
    ``tensorboard`` (``pip install tensorboard``). The first record imports it, and with it TensorFlow
    if that is installed, also beside PyTorch: this takes seconds.
    """

    def __init__(self, folder: str | Path) -> None:
        require("tensorboard", "TensorBoard", "tensorboard")
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(f'folder must be the path of a folder, got {folder!r}; write TensorBoard("runs/1")')
        self._folder = str(folder)
        self._scalar: Callable[[str, float, int], object] | None = None
        self._close: Callable[[], object] = lambda: None

    def __call__(self, record: Record) -> None:
        """Write the figures of a round."""
        if self._scalar is None:
            self._scalar, self._close = _of_torch(self._folder) if "torch" in sys.modules else _of_tf(self._folder)
        for name, value in figures(record).items():
            self._scalar(f"hvd_hetero/{name}", value, record["round"])

    def close(self) -> None:
        """Close the writer of TensorBoard's file."""
        self._close()


def _of_torch(folder: str) -> tuple[Any, Any]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)
    return writer.add_scalar, writer.close


def _of_tf(folder: str) -> tuple[Any, Any]:
    import tensorflow as tf

    writer = tf.summary.create_file_writer(folder)

    def scalar(name: str, value: float, step: int) -> None:
        with tf.init_scope(), writer.as_default(step):
            tf.summary.scalar(name, value)

    return scalar, writer.close
