"""``moe-cpu bench``: measures layers on this machine, beside torch's own and beside other kernels."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from moe_cpu import isa
from moe_cpu.benchmark import ROUTINGS, Suite, cuda, plot, run, runner, table
from moe_cpu.benchmark.baselines import BASELINES
from moe_cpu.benchmark.case import DEVICES
from moe_cpu.benchmark.checkpoint import Checkpoint
from moe_cpu.benchmark.report import SKIPPED
from moe_cpu.cli import end_to_end, overheads
from moe_cpu.cli.options import check_files, counts, file_name, names, with_progress
from moe_cpu.errors import ArgumentError, IsaUnavailable
from moe_cpu.models import MODELS, ModelShape, find

# Small enough to say something useful within a minute on two cores; the proportions are those of Qwen3's layers.
DEFAULT_SHAPE = ModelShape("qwen3-like", E=64, topk=8, K=1024, I=512)

_EPILOG = f"""\
models: {", ".join(MODELS)}
baselines: {", ".join(BASELINES)}
on cuda: {", ".join(cuda.NAMES)}
The answer of every contender is compared with float64 before its time counts. Exit status 1: one of our backends was wrong
or raised, or one that was asked for by name cannot run here.
"""


def add_parser(commands: Any) -> None:
    """Adds the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure layers on this machine",
        description="Measures Mixture-of-Experts layers; without options, a small one.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "--suite",
        metavar="FILE",
        type=file_name,
        help="a grid from a JSON file (bench/suites); other options override it",
    )
    what.add_argument("--model", metavar="NAME", type=names, help="published shapes, by name")
    what.add_argument("--shape", metavar="E,topk,K,I", type=_shape, help="any shape")
    what.add_argument(
        "--experts",
        metavar="E",
        type=int,
        help="keep only so many experts of the model, as one of several ranks would",
    )
    what.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=file_name,
        help="weights and router of a Hugging Face checkpoint on disk",
    )
    what.add_argument("--layer", metavar="L", type=int, help="layer of the checkpoint (default 0)")
    what.add_argument("--tokens", metavar="M,...", type=counts, help="tokens in a call")
    what.add_argument(
        "--routing",
        metavar="NAME,...",
        type=names,
        help=", ".join(r for r in ROUTINGS if r != "router") + ", zipf-EXPONENT",
    )
    what.add_argument("--device", choices=DEVICES, help="where (default cpu)")
    overheads.add_argument(what)
    who = parser.add_argument_group("who takes part")
    who.add_argument(
        "--backend",
        metavar="NAME,...",
        type=names,
        help="our backends; native:avx2 forces an instruction set",
    )
    who.add_argument(
        "--baseline",
        metavar="NAME,...",
        type=names,
        help="others; ratios are to the first (default grouped_mm; none for none)",
    )
    who.add_argument(
        "--isa",
        metavar="NAME,...",
        type=names,
        help="run the native backend once with each of these instruction sets",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--threads",
        metavar="N,...",
        type=counts,
        help="OpenMP threads; of several numbers, every point is measured with each",
    )
    how.add_argument(
        "--seconds", metavar="S", type=float, help="time for one point, shared by its contenders"
    )
    how.add_argument("--seed", metavar="N", type=int, help="what random numbers start from (default 0)")
    end_to_end.add_arguments(parser)
    out = parser.add_argument_group("results")
    out.add_argument("--json", metavar="FILE", type=file_name, help="write everything measured")
    out.add_argument(
        "--plot", metavar="FILE.png", type=file_name, help="draw rooflines and tokens/s (needs matplotlib)"
    )
    parser.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Measures, prints the table, writes files."""
    for asked, instead in ((end_to_end.asked_for(options), end_to_end), (options.overheads, overheads)):
        if asked:
            options.threads = _one(options.threads)
            return instead.main(options)
    suite, checkpoint = build_suite(options)
    for name in options.isa or ():
        if name in isa.names() and (reason := isa.why_not(name)) is not None:
            raise IsaUnavailable(f"bench: --isa {name}: {reason}")
    if options.plot:
        plot.pyplot(options.plot)  # or it is refused before anything is measured
    check_files(options)
    keep = (lambda report: report.save(options.json)) if options.json else None
    if suite.device == "cuda":
        steps = 1 + len(suite.shapes) * (1 + len(list(suite.points())))
        report = with_progress(lambda tell: cuda.run(suite, progress=tell, keep=keep), steps)
    else:
        report = with_progress(
            lambda tell: run(suite, source=checkpoint, progress=tell, keep=keep), runner.steps(suite)
        )
    for line in table.lines(report):
        print(line)
    if options.plot:
        plot.save(report, options.plot)
    # Whoever names a backend wants it to run; one that only stands in the default list may be absent.
    named = options.backend is not None or options.isa is not None
    absent = named and any(row.ours and row.status == SKIPPED for row in report.rows)
    return 0 if report.ok and not absent else 1


def build_suite(options: argparse.Namespace) -> tuple[Suite, Checkpoint | None]:
    """The suite that the options describe, and the checkpoint its weights come from, if any.

    Raises:
        ArgumentError: options that contradict each other, or a wrong value.
    """
    given = [name for name in ("suite", "model", "shape", "checkpoint") if getattr(options, name)]
    if len(given) > 1:
        raise ArgumentError(
            f"bench: expected one of --suite, --model, --shape and --checkpoint, got --{' and --'.join(given)}"
        )
    if options.layer is not None and not options.checkpoint:
        raise ArgumentError("bench: --layer chooses among the layers of a --checkpoint, and none was given")
    checkpoint = Checkpoint(options.checkpoint, options.layer or 0) if options.checkpoint else None
    changes: dict[str, Any] = {}
    if checkpoint is not None:
        if options.device == "cuda":
            raise ArgumentError(
                "bench: --checkpoint is measured on the cpu; give --model or --shape for cuda"
            )
        if options.routing:
            raise ArgumentError("bench: --routing contradicts --checkpoint, which brings its own router")
        suite = Suite((checkpoint.shape,), routings=("router",), name="checkpoint")
    elif options.suite:
        suite = Suite.load(options.suite)
    else:
        shapes = tuple(map(find, options.model)) if options.model else (options.shape or DEFAULT_SHAPE,)
        suite = Suite(shapes, name=shapes[0].name)
        if options.device == "cuda":
            suite = replace(suite, contenders=cuda.CONTENDERS)
    if options.experts is not None:
        if checkpoint is not None:
            raise ArgumentError("bench: --experts contradicts --checkpoint, whose router knows all experts")
        changes["shapes"] = tuple(shape.with_experts(options.experts) for shape in suite.shapes)
    for option, name in (
        ("device", "device"),
        ("tokens", "tokens"),
        ("routing", "routings"),
        ("threads", "threads"),
        ("seconds", "seconds"),
        ("seed", "seed"),
    ):
        if getattr(options, option) is not None:
            value = getattr(options, option)
            changes[name] = tuple(value) if isinstance(value, list) else value
    changes.update(_contenders(suite, options))
    return replace(suite, **changes), checkpoint


def _contenders(suite: Suite, options: argparse.Namespace) -> dict[str, Any]:
    ours = (
        [name for name in suite.contenders if name not in BASELINES]
        if options.backend is None
        else options.backend
    )
    if options.isa:
        forced = [f"native:{name}" for name in options.isa]
        ours = [name for old in ours for name in (forced if old == "native" else [old])]
        if not set(forced) & set(ours):
            raise ArgumentError(
                f"bench: --isa is for the native backend, but the backends are {', '.join(ours)}"
            )
    theirs = [name for name in suite.contenders if name in BASELINES]
    baseline = suite.baseline
    if options.baseline is not None:
        theirs = [name for name in options.baseline if name != "none"]
        unknown = [name for name in theirs if name not in BASELINES]
        if unknown:
            raise ArgumentError(
                f"bench: expected baselines among {', '.join(BASELINES)} or none, got {', '.join(unknown)}"
            )
        baseline = theirs[0] if theirs else ""
    return {"contenders": tuple(dict.fromkeys([*ours, *theirs])), "baseline": baseline}


def _one(threads: list[int] | None) -> int | None:
    """The only number there is."""
    if threads is None or len(threads) == 1:
        return None if threads is None else threads[0]
    raise ArgumentError(
        f"bench: --threads expects one number where layers are not what is measured, got {threads}"
    )


def _shape(text: str) -> ModelShape:
    numbers = counts(text)
    if len(numbers) != 4:
        raise argparse.ArgumentTypeError(f"expected four numbers E,topk,K,I, got {text!r}")
    E, topk, K, width = numbers
    if not 1 <= topk <= E or min(K, width) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 <= topk <= E, K >= 1 and I >= 1, got {text!r}")
    return ModelShape("custom", E, topk, K, width)
