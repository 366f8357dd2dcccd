"""Write a run to a file, one JSON line per round. Trouble with the file never reaches the training."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from hvd_hetero.checks import integer
from hvd_hetero.measurement.memory import HEADROOM
from hvd_hetero.telemetry.files import named
from hvd_hetero.telemetry.records import SCHEMA, VERSION, Record, Recorder

_ENCODER = json.JSONEncoder(separators=(",", ":"))

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Where rank 0 writes the record of a run, and how much of it: ``LoadBalance(telemetry=Telemetry(…))``.

    Parameters
    ----------
    path
        The file. An earlier one of this name is kept under another name.
    every
        Write every ``every``-th round. Others are not recorded.
    ledger
        Write which samples each rank does in each micro-batch, so that ``hvd-hetero replay`` can train again in one
        process. In PyTorch this also seeds random numbers at each micro-batch.
    """

    path: str | os.PathLike[str]
    every: int = 1
    ledger: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) or not isinstance(os.fspath(self.path), str):
            raise TypeError(f'telemetry must be a path, got {self.path!r}; write telemetry="run.jsonl"')
        if not Path(self.path).name or "\0" in os.fspath(self.path):
            raise ValueError(
                f'telemetry must be the path of a file, got {os.fspath(self.path)!r}; write telemetry="run.jsonl", or '
                "None for no record"
            )
        integer("every", self.every, 1, remedy="with 1 every round is recorded")


class RunFile:
    """The file of a run: a line for the run, and one for each record, each flushed.

    If the file fails, the telemetry ends with one warning, and the training goes on. At the start a path that cannot
    be written is an error, unless the training ``goes_on`` from before. Rounds rise within a file: a training that
    loads an earlier state begins another file, as another job would.
    """

    def __init__(self, settings: Telemetry, header: dict[str, Any], *, goes_on: bool = False) -> None:
        self._path = Path(settings.path)
        self._header = header
        self._latest = -1  # round
        self._file: TextIO | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._begin(f"{named(self._path)} exists already, and is")
        except OSError as error:
            if not goes_on:  # a mistake of the user, to be reported at once
                why = "its folder is a file" if isinstance(error, FileExistsError) else error.strerror or error
                refusal = type(error)(
                    f"telemetry must be a file that rank 0 can write, got {str(self._path)!r}: {why}; name another "
                    "file, or leave telemetry out"
                )
                refusal.errno = error.errno
                raise refusal from error
            self._warn(error)

    def __call__(self, record: Record) -> None:
        """Write a record and hand it to the operating system: a crash of this process takes no line that is written."""
        goes_back, self._latest = record["round"] <= self._latest, record["round"]
        if self._file is not None and goes_back:
            self.close()
            try:
                self._begin("rounds begin again at an earlier one; those so far are")
            except OSError as error:
                self._warn(error)
        self._write(_json(record))

    def write_ledger(self, entry: dict[str, Any]) -> None:
        """Write what the ranks have done in a round, before the round's own line."""
        # Its own line, since a round's waits for the next round: a commit may keep a round whose line a crash takes.
        self._write(_ENCODER.encode(entry))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:  # some file systems report a full disk only now
                self._warn(error)

    def _begin(self, why: str) -> None:
        """Begin a file, and keep a former one under another name; another job may do so at the same moment."""
        kept = ""
        while self._file is None:
            try:
                self._file = self._path.open("x", encoding="utf-8")
            except FileExistsError:
                if _is_no_file(self._path):
                    self._file = self._path.open("a", encoding="utf-8")
                else:
                    kept = _keep_former(self._path) or kept  # a job that still writes to it goes on
        if kept:
            logger.warning("%s kept as %s", why, named(kept))
        began = datetime.now(UTC).isoformat(timespec="microseconds")  # of one length, so that text sorts as time does
        self._write(_json({**self._header, "began": began}))

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(f"{line}\n")
            self._file.flush()
        except OSError as error:
            self._warn(error)
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # closing tries to write the rest to the same full disk
                file.close()

    def _warn(self, error: OSError) -> None:
        logger.warning("telemetry ends here, training goes on: cannot write %s: %s", named(self._path), error)


class TelemetryWriter(Recorder):
    """Take finished rounds, write them to a new file, and hand their records to listeners."""

    def __init__(
        self,
        telemetry: str | os.PathLike[str] | Telemetry,
        *,
        policy: str,
        workers: int,
        global_batch: int,
        goes_on: bool = False,
    ) -> None:
        settings = telemetry if isinstance(telemetry, Telemetry) else Telemetry(telemetry)
        header = {
            "schema": SCHEMA,
            "version": VERSION,
            "policy": policy,
            "workers": workers,
            "global_batch": global_batch,
            "headroom": HEADROOM,
            "every": settings.every,
        }
        self.file = RunFile(settings, header, goes_on=goes_on)
        super().__init__(self.file, every=settings.every)


def _json(line: dict[str, Any]) -> str:
    pairs = ",".join(f'"{key}":{_value(value)}' for key, value in line.items())
    return f"{{{pairs}}}"


def _value(value: Any) -> str:
    """Return a value as JSON; measured figures have seven digits, as a float32 has."""
    if isinstance(value, float):
        return f"{value:.7g}"
    if not isinstance(value, list) or not value or isinstance(value[0], int):
        return _ENCODER.encode(value)
    return f"[{','.join('null' if figure is None else f'{figure:.7g}' for figure in value)}]"


def _is_no_file(path: Path) -> bool:
    """Return whether something else is there, such as a pipe, or a link that leads nowhere yet."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:  # if it is no link, another job has just renamed it
        return path.is_symlink()


def _keep_former(path: Path) -> str:
    """Rename the file at this path to the next free number, and return that name; "" if it is gone.

    One file cannot hold two runs, because the number of ranks may differ. The name is created first, so no two jobs
    take the same one.
    """
    for number in itertools.count(1):
        kept = path.with_name(f"{path.stem}.{number}{path.suffix}")
        with contextlib.suppress(FileExistsError):
            kept.touch(exist_ok=False)
            break
    try:
        path.rename(kept)
    except FileNotFoundError:
        kept.unlink()
        return ""
    return kept.name
