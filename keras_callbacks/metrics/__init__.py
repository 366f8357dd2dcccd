"""Metrics over the samples of all ranks."""
