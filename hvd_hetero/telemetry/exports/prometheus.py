"""A text file for Prometheus: the textfile collector of node_exporter reads it."""

from __future__ import annotations

import logging
import numbers
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvd_hetero.telemetry.exports.named_numbers import require
from hvd_hetero.telemetry.records import Record

logger = logging.getLogger(__name__)

_NAME = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")
_SECONDS = {"compute_s": "computing", "input_s": "waiting for its own data", "wait_s": "waiting for others"}


class PrometheusFile:
    """Keep a file with the figures of a training; it is replaced as a whole, so that no reader sees half of it.

    Counters add up the rounds that the listener gets: register it for every round.

    Parameters
    ----------
    path
        A file ending in ``.prom`` in the folder of node_exporter's ``--collector.textfile.directory``.
    every_s
        Write it at most once in so many seconds, and at the end.
    labels
        Labels of all figures, such as ``{"run": "7"}``. Two trainings on one machine need different ones.

    A file that cannot be written is tried again after ``every_s``, with one warning.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every_s: float = 15.0,
        labels: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require("prometheus_client", "PrometheusFile", "prometheus-client")
        self._path = _path(path)
        self._every_s = _seconds(every_s)
        self._labels = _named(labels)
        self._clock = clock
        self._warned = False
        self._next_s = -np.inf
        self._record: Record | None = None
        self._totals: dict[str, Any] = dict.fromkeys(("rounds", "samples", *_SECONDS), 0)

    def __call__(self, record: Record) -> None:
        """Count a round, and write the file if the last time is long enough ago."""
        self._record = record
        self._totals["rounds"] += 1
        self._totals["samples"] += sum(record["samples"])
        for name in _SECONDS:
            self._totals[name] = self._totals[name] + np.nan_to_num(np.array(record[name], np.float64))
        now = self._clock()
        if now >= self._next_s:
            self._next_s = now + self._every_s
            self._write()

    def close(self) -> None:
        """Write the file once more."""
        if self._record is not None:
            self._write()

    def collect(self) -> Iterator[Any]:
        """Yield the figures, as Prometheus's registry asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self._record is None:
            return
        names, values = list(self._labels), list(self._labels.values())

        def family(kind: Any, name: str, help: str, figures: Any) -> Any:
            """Return one figure for the training, or one for each rank."""
            of_ranks = isinstance(figures, list)
            made = kind(f"hvd_hetero_{name}", help, labels=[*names, *(["rank"] if of_ranks else [])])
            for rank, figure in enumerate(figures if of_ranks else [figures]):
                made.add_metric([*values, *([str(rank)] if of_ranks else [])], figure)
            return made

        samples, elapsed_s = self._record["samples"], self._record["elapsed_s"]
        rate = sum(samples) / elapsed_s if elapsed_s > 0 else 0.0
        yield family(GaugeMetricFamily, "round", "Number of the latest round", self._record["round"])
        yield family(GaugeMetricFamily, "samples_per_second", "Of all ranks, in the latest round", rate)
        yield family(GaugeMetricFamily, "batch_samples", "Samples of the rank in the latest round", samples)
        yield family(CounterMetricFamily, "rounds", "Rounds of this training", self._totals["rounds"])
        yield family(CounterMetricFamily, "samples", "Samples of all ranks", self._totals["samples"])
        for name, doing in _SECONDS.items():
            total = self._totals[name].tolist()
            yield family(CounterMetricFamily, f"{name.removesuffix('_s')}_seconds", f"Seconds of {doing}", total)

    def _write(self) -> None:
        from prometheus_client import CollectorRegistry, write_to_textfile

        registry = CollectorRegistry()
        registry.register(self)
        try:
            write_to_textfile(self._path, registry)
        except OSError as error:  # a folder that is mounted late, a disk that is full: the next time it may work
            if not self._warned:
                logger.warning(
                    "cannot write %s: %s; it is tried again every %g s, and training goes on",
                    *(self._path, error.strerror or error, self._every_s),
                )
            self._warned = True
        else:
            self._warned = False


def _path(path: Any) -> str:
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TypeError(f'path must be the path of a file, got {path!r}; write PrometheusFile("train.prom")')
    if Path(path).suffix != ".prom" or "\0" in os.fspath(path):
        raise ValueError(f"path must be NAME.prom, got {os.fspath(path)!r}; the collector reads no other files")
    return os.fspath(path)


def _seconds(every_s: Any) -> float:
    if not isinstance(every_s, numbers.Real) or isinstance(every_s, bool):
        raise TypeError(f"every_s must be a number of seconds, got {every_s!r}; the default is 15")
    if not float(every_s) >= 0:
        raise ValueError(f"every_s must be at least 0 seconds, got {every_s!r}; with 0 it is written every round")
    return float(every_s)


def _named(labels: Any) -> dict[str, str]:
    """Return labels that Prometheus accepts: it refuses a whole file for one that it does not."""
    for name, value in (labels or {}).items():
        if not isinstance(value, str):
            raise TypeError(f"labels must hold text, got {name!r}: {value!r}; write {str(name)!r}: {str(value)!r}")
        if not _NAME.fullmatch(name) or name.startswith("__") or name == "rank":
            raise ValueError(
                "labels must have names of ASCII letters, digits and _, which begin with a letter or one _, and are "
                f"not 'rank', got {name!r}; rename it"
            )
    return dict(labels or {})
