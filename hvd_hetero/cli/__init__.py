"""The command ``hvd-hetero``, one module for each of its subcommands."""

from hvd_hetero.cli.commands import main

__all__ = ["main"]
