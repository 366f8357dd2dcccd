"""Records of a run: rank 0 makes one per round, writes them to a file, and `read_run` reads them back."""

from typing import TYPE_CHECKING

from hvd_hetero.lazy import lazily

if TYPE_CHECKING:
    from hvd_hetero.telemetry.ledger_reader import read_ledger
    from hvd_hetero.telemetry.records import SCHEMA, VERSION, Record, Recorder
    from hvd_hetero.telemetry.run import Run, read_run
    from hvd_hetero.telemetry.writer import Telemetry, TelemetryWriter

__all__ = ["SCHEMA", "VERSION", "Record", "Recorder", "Run", "Telemetry", "TelemetryWriter", "read_ledger", "read_run"]

__getattr__ = lazily(__name__)
