"""``hvd-hetero build-horovod``: hand the options to the builder, which is a distribution of its own."""

import argparse
from pathlib import Path

from hvd_hetero.errors import HeteroError

BUILDER_MISSING = (
    "to build Horovod, this environment lacks\n"
    "  - the package hvd-hetero-horovod: `pip install ./packaging/horovod` (in a checkout of hvd-hetero)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--install", action="store_true", help="install the wheel into this environment as well")
    parser.add_argument("--force", action="store_true", help="build even if the cache holds the wheel")
    parser.add_argument("--jobs", type=_positive, metavar="N", help="compilers at once (default: one per core)")
    parser.add_argument("--sdist", type=Path, metavar="FILE", help="use this source distribution; download nothing")
    parser.add_argument("--print-path", action="store_true", help="print the wheel's path, and nothing else, on stdout")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--check-tools", action="store_true", help="only look for the compiler, CMake and the rest")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    try:
        from horovod_build import HorovodBuildError, build_horovod, find_toolchain
    except ModuleNotFoundError as error:
        if error.name != "horovod_build":
            raise
        raise HeteroError(BUILDER_MISSING) from None
    try:
        if args.check_tools:
            find_toolchain()
        else:
            build_horovod(args)
    except HorovodBuildError as error:
        raise HeteroError(str(error)) from error
    return 0
