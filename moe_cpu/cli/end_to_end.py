"""``moe-cpu bench --model-dir`` and ``--random-config``: a whole transformers model instead of a layer."""

from __future__ import annotations

import argparse
import sys

from moe_cpu.benchmark.end_to_end.settings import ModelSource, Settings
from moe_cpu.cli.options import OF_LAYERS, check_files, counts, given, names, with_progress
from moe_cpu.errors import ArgumentError

# Options of single layers, which mean nothing here.
_FOREIGN = ("model", "shape", *OF_LAYERS)
_OWN = ("model_dir", "random_config", "layers", "prompt_tokens", "new_tokens", "batch", "implementations")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the group of options; --experts, --threads, --seconds, --seed, --json and --plot are shared with layers."""
    group = parser.add_argument_group("a whole transformers model, instead of a layer")
    group.add_argument(
        "--model-dir", metavar="DIR", help="checkpoint that transformers can load, run in bf16"
    )
    group.add_argument(
        "--random-config", metavar="NAME", help="random weights in the sizes of a published model"
    )
    group.add_argument(
        "--layers", metavar="N", type=int, help="with --random-config: only so many decoder layers"
    )
    group.add_argument("--prompt-tokens", metavar="N", type=int, help="length of a prompt (default 512)")
    group.add_argument("--new-tokens", metavar="N", type=int, help="decode steps (default 64)")
    group.add_argument(
        "--batch",
        metavar="B,...",
        type=counts,
        help="sequences at a time, one measurement each (default 1,8)",
    )
    group.add_argument(
        "--implementations",
        metavar="NAME,...",
        type=names,
        help="experts implementations; ratios are to the first (default grouped_mm,moe_cpu)",
    )


def asked_for(options: argparse.Namespace) -> bool:
    """Whether any option is one of a whole model."""
    return bool(given(options, _OWN))


def main(options: argparse.Namespace) -> int:
    """Measures, prints the table, writes files."""
    settings = settings_of(options)
    try:
        import transformers
    except ImportError as error:
        raise ArgumentError("bench: whole models need transformers; install moe-cpu[transformers]") from error
    from moe_cpu.benchmark import plot as layer_plot
    from moe_cpu.benchmark.end_to_end import plot, runner, table

    if options.plot:
        layer_plot.pyplot(options.plot)  # or it is refused before anything is measured
    check_files(options)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    keep = (lambda report: report.save(options.json)) if options.json else None
    report = with_progress(
        lambda tell: runner.run(settings, progress=tell, keep=keep), runner.steps(settings)
    )
    for line in table.lines(report):
        print(line)
    if options.plot:
        plot.save(report, options.plot)
    return 0 if report.ok else 1


def settings_of(options: argparse.Namespace) -> Settings:
    """The measurement that the options describe.

    Raises:
        ArgumentError: options that contradict each other, or a wrong value.
    """
    if foreign := given(options, _FOREIGN):
        raise ArgumentError(
            f"bench: --{' and --'.join(foreign)} would measure a layer; expected only options of a whole model "
            "beside --model-dir or --random-config"
        )
    wanted = {
        name: getattr(options, name) for name in ("prompt_tokens", "new_tokens", "seconds", "threads", "seed")
    }
    wanted["batches"] = None if options.batch is None else tuple(options.batch)
    wanted["implementations"] = None if options.implementations is None else tuple(options.implementations)
    source = ModelSource(
        options.model_dir, options.random_config, options.layers, options.experts, options.seed or 0
    )
    return Settings(source, **{name: value for name, value in wanted.items() if value is not None})
