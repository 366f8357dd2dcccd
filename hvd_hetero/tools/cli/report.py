"""``hvd-hetero report``: where the time of a recorded run went, and why; in the terminal, and as one HTML page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvd_hetero.tools.cli.output import printer

# A narrower table would wrap its figures; a terminal scrolls or wraps the lines itself.
_TABLE_WIDTH = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("run_file", type=Path, metavar="RUN.jsonl", help="telemetry of a run")
    parser.add_argument("other_file", nargs="?", type=Path, metavar="OTHER.jsonl", help="another run, side by side")
    parser.add_argument("--page", type=Path, metavar="FILE.html", help="where to write the page (RUN.html)")
    parser.add_argument("--no-page", action="store_true", help="only the summary in the terminal")
    parser.add_argument(
        "--no-replay", action="store_true", help="do not simulate other splits, which takes most of the time"
    )
    parser.add_argument(
        "--prices",
        metavar="RANK=PRICE,…",
        help='what each rank costs per hour: "0=2.40,1=0.80"; also samples for the money',
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from hvd_hetero.telemetry.files import named
    from hvd_hetero.tools.cli.terminal import write_summary
    from hvd_hetero.tools.report.build import make_reports
    from hvd_hetero.tools.report.page import check_page, page

    if args.page is not None and args.no_page:
        raise ValueError("--page FILE.html and --no-page exclude each other; leave one of them out")
    if args.prices is not None and args.no_replay:
        raise ValueError("--prices needs the replay of the run; leave --no-replay out")
    page_file = args.page or args.run_file.with_suffix(".html")
    if not args.no_page:
        check_page(page_file)
    files = [args.run_file] if args.other_file is None else [args.run_file, args.other_file]
    reports = make_reports(files, replayed=not args.no_replay, prices=args.prices)
    console = printer(width=max(printer().width, _TABLE_WIDTH))
    if not args.no_page:
        page_file.write_text(page(reports), encoding="utf-8")
    write_summary(console, reports)
    if not args.no_page:
        sys.stderr.write(f"page: {named(page_file)}\n")
    return 0
