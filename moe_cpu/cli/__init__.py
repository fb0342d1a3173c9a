"""The command line: ``moe-cpu info``, ``moe-cpu bench``, ``moe-cpu plot``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from moe_cpu.benchmark.environment import version
from moe_cpu.cli import bench, info, plot
from moe_cpu.errors import MoEError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 when a check failed or the command cannot run here, 2 for a wrong option, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="moe-cpu", description=sys.modules["moe_cpu"].__doc__)
    parser.add_argument("--version", action="version", version=f"moe-cpu {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (info, bench, plot):
        module.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except MoEError as error:
        print(f"moe-cpu: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("moe-cpu: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe went away
        sys.stderr.close()
        return 1
    except OSError as error:  # a full disk, a file that cannot be made after all
        print(f"moe-cpu: {error}", file=sys.stderr)
        return 1
