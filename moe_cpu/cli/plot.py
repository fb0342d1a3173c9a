"""``moe-cpu plot``: pictures of a results file."""

from __future__ import annotations

import argparse
from typing import Any

from moe_cpu.benchmark import Report


def add_parser(commands: Any) -> None:
    """Adds the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plot", help="draw a results file of `moe-cpu bench --json`"
    )
    parser.add_argument("results", metavar="RESULTS.json")
    parser.add_argument(
        "picture", metavar="PICTURE.png", help="any format that matplotlib knows by its suffix"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Draws."""
    from moe_cpu.benchmark import plot

    plot.save(Report.load(options.results), options.picture)
    return 0
