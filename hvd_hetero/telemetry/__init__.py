"""Records of a run: rank 0 writes a line per round, `read_run` reads them back."""

from hvd_hetero.telemetry.records import SCHEMA, VERSION, Run, TelemetryWriter, read_run

__all__ = ["SCHEMA", "VERSION", "Run", "TelemetryWriter", "read_run"]
