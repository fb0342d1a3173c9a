"""``moe-cpu bench --overheads``: what surrounds the products of the experts."""

from __future__ import annotations

import argparse

from moe_cpu.cli.options import OF_LAYERS, check_files, given, with_progress
from moe_cpu.errors import ArgumentError
from moe_cpu.models import ModelShape, find

# Options of layers that mean nothing here.
_FOREIGN = (*OF_LAYERS, "plot")
_PACKED = "qwen3-30b-a3b"


def add_argument(group: argparse._ArgumentGroup) -> None:
    """Adds the option; --model, --shape, --experts, --threads, --seconds, --seed and --json are shared with layers."""
    group.add_argument(
        "--overheads",
        action="store_true",
        help=f"not layers, but what surrounds them: a call of nearly nothing, sorting ids, packing a layer (default {_PACKED})",
    )


def main(options: argparse.Namespace) -> int:
    """Measures, prints the table, writes the file."""
    shape = shape_of(options)
    check_files(options)
    from moe_cpu.benchmark.overheads import runner, table

    wanted = {name: getattr(options, name) for name in given(options, ("threads", "seconds", "seed"))}
    report = with_progress(lambda tell: runner.run(shape, progress=tell, **wanted), runner.STEPS)
    for line in table.lines(report):
        print(line)
    if options.json:
        report.save(options.json)
    return 0 if report.ok else 1


def shape_of(options: argparse.Namespace) -> ModelShape:
    """The layer to pack.

    Raises:
        ArgumentError: options that mean nothing here, or more than one layer.
    """
    if foreign := given(options, _FOREIGN):
        raise ArgumentError(
            f"bench: --{' and --'.join(foreign)} would measure layers; expected only --model or --shape, --experts, --threads, "
            "--seconds, --seed and --json beside --overheads"
        )
    models = options.model or ([] if options.shape else [_PACKED])
    shapes = [*map(find, models), *filter(None, [options.shape])]
    if len(shapes) > 1:
        raise ArgumentError(
            f"bench: --overheads packs one layer, got {', '.join(shape.name for shape in shapes)}"
        )
    return shapes[0] if options.experts is None else shapes[0].with_experts(options.experts)
