"""Records of a run: rank 0 makes one per round, writes them to a file, and `read_run` reads them back."""

from hvd_hetero.telemetry.records import SCHEMA, VERSION, Record, Recorder, Run, read_run
from hvd_hetero.telemetry.recoveries import Recovery
from hvd_hetero.telemetry.writer import Telemetry, TelemetryWriter

__all__ = ["SCHEMA", "VERSION", "Record", "Recorder", "Recovery", "Run", "Telemetry", "TelemetryWriter", "read_run"]
