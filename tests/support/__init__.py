"""What the project's own tests and benchmarks launch ranks with, beside ``hvd_hetero.testing``."""
