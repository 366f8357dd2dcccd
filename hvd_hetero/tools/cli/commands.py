"""The command ``hvd-hetero``: a table of subcommands, each a module that declares its options and runs.

A command's module must import nothing heavy at its top level, because writing the help imports all of them.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

from hvd_hetero import __version__
from hvd_hetero.errors import HeteroError
from hvd_hetero.tools.cli import build_horovod, check, profile, replay, report, simulate
from hvd_hetero.tools.cli.output import reader_left

# As shells report a program that SIGPIPE ends: 128 + 13.
READER_LEFT = 141


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: its name, a line of help, its options, and a function that returns the exit code."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


_HELP: dict[ModuleType, str] = {
    build_horovod: "build a wheel of Horovod 0.28.1 for the installed torch and TensorFlow",
    check: "say whether this installation can train, and which command repairs what is wrong",
    profile: "time one training step over batch sizes: where this device saturates, what a sample costs, where memory "
    "ends",
    replay: "train again in one process on the micro-batches of a run that was recorded with Telemetry(ledger=True)",
    report: "say where the time of a recorded run went, which rank was slow, and why: in the terminal, and as an HTML "
    "page",
    simulate: "compute what each policy would gain, on a cluster described in a file or on the machines of a recorded "
    "run",
}
COMMANDS = tuple(
    Command(module.__name__.rpartition(".")[2].replace("_", "-"), text, module.add_arguments, module.run)
    for module, text in _HELP.items()
)


def make_parser(commands: Sequence[Command] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="hvd-hetero", description="Load-balanced, exact training with Horovod.")
    parser.add_argument("--version", action="version", version=f"hvd-hetero {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in commands:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Run a command and return its exit code: 0, 1 if it failed, 2 for wrong arguments, 130 if interrupted.

    141 if the reader of its output has left and nothing else is wrong, which is the reader's choice, and no error.
    """
    args = make_parser(commands).parse_args(argv)
    try:
        code = int(args.run(args))
        left = reader_left()
        return code or (READER_LEFT if left else 0)
    except KeyboardInterrupt:
        sys.stderr.write("hvd-hetero: interrupted\n")
        return 130
    except (HeteroError, ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and reader_left():
            return READER_LEFT
        if args.traceback:
            raise
        sys.stderr.write(f"hvd-hetero: error: {error}\n")
        # As argparse does for wrong arguments.
        return 2 if isinstance(error, ValueError) else 1
