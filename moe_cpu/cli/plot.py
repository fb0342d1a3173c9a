"""``moe-cpu plot``: pictures of a results file."""

from __future__ import annotations

import argparse
from typing import Any

from moe_cpu.benchmark.end_to_end.report import EndToEndReport
from moe_cpu.benchmark.report import Report
from moe_cpu.benchmark.saved import read_json
from moe_cpu.cli.options import check_writable
from moe_cpu.errors import ArgumentError, MoEError


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
    """Draws what the file holds: layers, or a whole model."""
    from moe_cpu.benchmark import plot
    from moe_cpu.benchmark.end_to_end import plot as end_to_end_plot

    check_writable("plot", options.picture)
    kind = read_json(options.results).get("kind")
    if kind not in (None, EndToEndReport.kind):
        raise ArgumentError(f"plot: {options.results} holds {kind}, of which there is no picture")
    end_to_end = kind == EndToEndReport.kind
    report: Any = (EndToEndReport if end_to_end else Report).load(options.results)
    try:
        (end_to_end_plot if end_to_end else plot).save(report, options.picture)
    except (MoEError, OSError):
        raise
    except Exception as error:  # what `load` had no eye for may end in anything, deep in matplotlib
        raise ArgumentError(
            f"plot: {options.results} lacks something or holds what cannot be drawn: {error!r}"
        ) from error
    return 0
