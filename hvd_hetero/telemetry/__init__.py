"""Records of a run: written by rank 0, a line for each round, and read back."""

from hvd_hetero.telemetry.records import SCHEMA, VERSION, Run, TelemetryWriter, read_run

__all__ = ["SCHEMA", "VERSION", "Run", "TelemetryWriter", "read_run"]
