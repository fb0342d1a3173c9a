"""Runs a suite: plan the memory, measure the ceilings, then shape by shape make the weights and measure every point."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch

from moe_cpu import isa
from moe_cpu.benchmark import backends, environment, memory, roofline, timing
from moe_cpu.benchmark.case import Suite
from moe_cpu.benchmark.contender import Contender
from moe_cpu.benchmark.inputs import RandomSource, Source, copy_layer
from moe_cpu.benchmark.point import Session, Weights, measure
from moe_cpu.benchmark.report import Report
from moe_cpu.models import ModelShape

# Share of a limit from which a result says that the limit was measured too low.
_BEYOND = 1.05


def run(
    suite: Suite,
    *,
    source: Source | None = None,
    progress: Callable[[str], None] | None = None,
    keep: Callable[[Report], None] | None = None,
) -> Report:
    """Measures every point of a suite.

    Args:
        suite: what to measure.
        source: of weights and calls, for example a `Checkpoint`; None for random ones.
        progress: called with a short text before each step: the ceilings, each shape's weights, each point.
        keep: called with the report so far after each point, so that a crash inside a competitor loses little.

    Raises:
        ArgumentError: an unknown contender.
        OutOfMemory: some shape does not fit; raised before anything is measured, with the numbers.
    """
    tell = progress or (lambda text: None)
    source = source or RandomSource()
    names = dict.fromkeys((*suite.contenders, *filter(None, [suite.baseline])))
    contenders = [backends.find(name) for name in names]
    counts = suite.thread_counts
    with threads_set(counts[-1]) as most, torch.no_grad():
        cache = memory.last_level_cache_bytes() if suite.cold else 0
        extra, available = roofline.probe_bytes(cache), memory.available_bytes()
        able = [c for c in contenders if not (c.fixed_threads and len(counts) > 1)]
        runnable = {shape: [c for c in able if c.why_not(shape) is None] for shape in suite.shapes}
        plans = {
            s: memory.plan(s, max(suite.tokens), runnable[s], cache, extra, available) for s in suite.shapes
        }
        tell("ceilings")
        forced = {c.isa for c in contenders if c.isa is not None and isa.why_not(c.isa) is None}
        measured = [roofline.measure(threads, forced, cache) for threads in counts]
        ceilings = [found for found in measured if found is not None]
        report = Report(environment.describe(most), ceilings[-1] if ceilings else None)
        report.fewer_threads = ceilings[:-1]
        if not suite.cold:
            report.notes.append("weights may have come from the cache, so shares of the limit mean little")
        elif cache == 0:
            report.notes.append(
                "nobody says how large the last-level cache is, so weights may have come from it"
            )
        evict = timing.CacheEvictor(cache)  # of nothing, for a suite that is not cold
        session = Session(suite, source, contenders, {c.threads: c for c in ceilings}, evict, cache)
        for shape in suite.shapes:
            tell(f"{shape.name}: weights")
            report.notes.extend(plans[shape].notes(shape, cache))
            weights = _make_weights(source, shape, suite.seed, runnable[shape], plans[shape].layers)
            for M, threads in itertools.product(suite.tokens, counts):
                tell(f"{shape.name}: M = {M}" + (f", {threads} threads" if len(counts) > 1 else ""))
                with threads_set(threads):
                    report.rows.extend(measure(session, weights, shape, M))
                if keep is not None:
                    keep(report)
            del weights  # before the next shape's are made
    # A ceiling is the best of a moment; on a machine that others share, the next moment may be better.
    if suite.cold and any((row.efficiency or 0) > _BEYOND for row in report.rows):
        report.notes.append(
            "more than 100 % of a limit: the machine was slower while its ceilings were measured than later; run again when it is quiet"
        )
        if keep is not None:
            keep(report)
    return report


def steps(suite: Suite) -> int:
    """How many steps `run` tells of."""
    return 1 + len(suite.shapes) * (1 + len(suite.tokens) * len(suite.thread_counts))


@contextlib.contextmanager
def threads_set(wanted: int | None) -> Iterator[int]:
    """torch's number of threads inside, `wanted` or what it was; it is taken back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _make_weights(
    source: Source, shape: ModelShape, seed: int, contenders: list[Contender], layers: int
) -> Weights:
    first = source.make_layer(shape, seed)
    weights = Weights(first, {c.name: [] for c in contenders}, {}, layers)
    for number in range(layers):
        layer = first if number == 0 else copy_layer(first, number)
        for contender in contenders:
            if contender.name in weights.failures:
                continue
            try:
                weights.prepared[contender.name].append(contender.prepare(layer, shape))
            except Exception as error:  # a competitor's code may raise anything
                weights.failures[contender.name] = f"preparing weights: {type(error).__name__}: {error}"
                weights.prepared[contender.name].clear()
    return weights
