"""The command ``hvd-hetero``: one module per subcommand."""

from hvd_hetero.tools.cli.commands import main

__all__ = ["main"]
