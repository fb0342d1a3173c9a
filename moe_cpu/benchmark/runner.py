"""Runs a suite: plan the memory, make the weights, check every answer, take the times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moe_cpu import isa
from moe_cpu.benchmark import backends, check, environment, memory, roofline, timing
from moe_cpu.benchmark.case import Case, Suite
from moe_cpu.benchmark.contender import Contender
from moe_cpu.benchmark.inputs import DenseLayer, Inputs, copy_layer, generator, random_layer, random_routing, random_tokens
from moe_cpu.benchmark.report import FAILED, OK, SKIPPED, WRONG, Report, Row
from moe_cpu.models import ModelShape

Progress = Callable[[str], None]
# Makes the inputs of one call: shape, M, routing, generator, seed of the experts' popularity.
MakeInputs = Callable[[ModelShape, int, str, torch.Generator, int], Inputs]


def random_inputs(shape: ModelShape, M: int, routing: str, rng: torch.Generator, popularity_seed: int) -> Inputs:
    """Normal tokens and drawn routing."""
    return Inputs(random_tokens(M, shape.K, rng), *random_routing(shape, M, routing, rng, popularity_seed))


@dataclass
class _Weights:
    """Layers of one shape: the first one dense, for checking, and each contender's own form of all of them."""

    first: DenseLayer
    prepared: dict[str, list[Any]]
    plan: memory.Plan


def run(
    suite: Suite,
    *,
    progress: Progress | None = None,
    make_layer: Callable[[ModelShape, int], DenseLayer] = random_layer,
    make_inputs: MakeInputs = random_inputs,
    most_layers: int | None = None,
) -> Report:
    """Measures every point of a suite.

    Args:
        suite: what to measure.
        progress: called with a short text before each step; the number of calls with a text is not fixed.
        make_layer, make_inputs: other sources of weights and of tokens with their routing, for example a checkpoint.
        most_layers: upper bound of the layers of weights in turn, or None.

    Raises:
        ArgumentError: an unknown contender.
        OutOfMemory: some shape does not fit; raised before anything is measured, with the numbers.
    """
    tell = progress or (lambda text: None)
    contenders = [backends.find(name) for name in dict.fromkeys((*suite.contenders, *filter(None, [suite.baseline])))]
    with _threads(suite.threads) as threads, torch.no_grad():
        cache = memory.last_level_cache_bytes() if suite.cold else 0
        available = memory.available_bytes()
        extra = max(2 * cache, roofline.probe_bytes(cache))
        runnable = {shape: [c for c in contenders if c.why_not(shape) is None] for shape in suite.shapes}
        plans = {s: memory.plan(s, max(suite.tokens), runnable[s], cache, extra, available) for s in suite.shapes}
        tell("ceilings")
        forced = {c.isa for c in contenders if c.isa is not None and isa.why_not(c.isa) is None}
        report = Report(environment.describe(threads), roofline.measure(threads, forced, cache))
        evict = timing.CacheEvictor(cache)  # of nothing, for a suite that is not cold
        for shape in suite.shapes:
            tell(f"{shape.name}: weights")
            plan = plans[shape]
            if plan.layers < plan.wanted_layers:
                report.notes.append(
                    f"{shape.name}: memory holds {plan.layers} of the {plan.wanted_layers} layers of weights that exceed twice the last-level "
                    f"cache of {cache / 2**20:.0f} MiB; the cache was emptied before each call instead"
                )
            weights = _make_weights(shape, suite.seed, runnable[shape], plan, make_layer, most_layers)
            for _, routing, M in (point for point in suite.points() if point[0] == shape):
                tell(f"{shape.name}: {routing}, M = {M}")
                point = _Point(suite, shape, routing, M, threads, contenders, weights, report, evict, cache, make_inputs)
                report.rows.extend(point.rows())
            del weights
    return report


@contextlib.contextmanager
def _threads(wanted: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _make_weights(
    shape: ModelShape,
    seed: int,
    contenders: list[Contender],
    plan: memory.Plan,
    make_layer: Callable[[ModelShape, int], DenseLayer],
    most_layers: int | None,
) -> _Weights:
    first = make_layer(shape, seed)
    prepared: dict[str, list[Any]] = {c.name: [] for c in contenders}
    for number in range(min(plan.layers, most_layers or plan.layers)):
        layer = first if number == 0 else copy_layer(first, number)
        for contender in contenders:
            prepared[contender.name].append(contender.prepare(layer, shape))
    return _Weights(first, prepared, plan)


@dataclass
class _Point:
    """All contenders at one shape, routing and number of tokens."""

    suite: Suite
    shape: ModelShape
    routing: str
    M: int
    threads: int
    contenders: list[Contender]
    weights: _Weights
    report: Report
    evict: timing.CacheEvictor
    cache: int
    make_inputs: MakeInputs

    def rows(self) -> list[Row]:
        self.rng = generator(self.suite.seed * 1_000_003 + self.M)
        rows = {c.name: self._row(c) for c in self.contenders}
        fit = {c.name: c for c in self.contenders if rows[c.name].status == OK}
        self._check(fit, rows)
        fit = {name: c for name, c in fit.items() if rows[name].status == OK}
        if fit:
            self._time(fit, rows)
        return [rows[name] for name in dict.fromkeys((*self.suite.contenders, *rows))]

    def _row(self, contender: Contender) -> Row:
        suite = self.suite
        case = Case(self.shape, self.M, contender.name, suite.scheme, self.threads, self.routing, suite.seed)
        reason = contender.why_not(self.shape)
        if reason is None and contender.max_tokens is not None and self.M > contender.max_tokens:
            reason = f"takes at most {contender.max_tokens} tokens a call"
        native = contender.ours and contender.name.startswith("native")
        row = Row(case, contender.isa or (isa.active() if native and isa.available() else None), contender.ours)
        if reason is not None:
            row.status, row.reason = SKIPPED, reason
        return row

    def _new_inputs(self) -> Inputs:
        return self.make_inputs(self.shape, self.M, self.routing, self.rng, self.suite.seed)

    def _check(self, contenders: dict[str, Contender], rows: dict[str, Row]) -> None:
        inputs = self._new_inputs()
        sample = check.sample_tokens(self.M, self.rng)
        want, scale = check.expected(self.weights.first, inputs, self.shape, sample)
        for name, contender in contenders.items():
            # A competitor may write into its inputs, which must not become the next one's problem.
            own = Inputs(*(t.clone() for t in inputs))
            try:
                with contender.active():
                    got = contender.run(self.weights.prepared[name][0], own, self.shape)
            except Exception as error:
                rows[name].status, rows[name].reason = FAILED, f"{type(error).__name__}: {error}"
                continue
            rows[name].relative_error, reason = check.verdict(got, sample, want, scale)
            if reason is not None:
                rows[name].status, rows[name].reason = WRONG, reason
            time.sleep(contender.settle)

    def _time(self, contenders: dict[str, Contender], rows: dict[str, Row]) -> None:
        works: list[roofline.Work] = []
        states = {name: contextlib.ExitStack() for name in contenders}
        layers = min(len(self.weights.prepared[name]) for name in contenders)

        def new_inputs() -> Inputs:
            inputs = self._new_inputs()
            works.append(roofline.routed_work(self.shape, inputs.topk_ids))
            return inputs

        # Between two calls on one layer the others' weights pass through the cache; when that is too little to replace it, it is emptied.
        expected = roofline.routed_work(self.shape, self._new_inputs().topk_ids).bytes
        evicts = layers * expected < 2 * self.cache

        def before(name: str) -> None:
            if evicts:
                self.evict()
            states[name].enter_context(contenders[name].active())

        def after(name: str) -> None:
            states[name].close()
            if contenders[name].settle:
                time.sleep(contenders[name].settle)

        def call(name: str) -> Callable[[Any, int], Any]:
            run, prepared = contenders[name].run, self.weights.prepared[name]
            return lambda inputs, number: run(prepared[number % layers], inputs, self.shape)

        taken = timing.interleave({name: call(name) for name in contenders}, new_inputs, self.suite.seconds, before, after)
        counted = works[1:]
        work = roofline.Work(*(timing.percentile([getattr(w, part) for w in counted], 0.5) for part in ("flops", "bytes")))
        ceilings = self.report.ceilings
        for name, seconds in taken.items():
            row = rows[name]
            row.times, row.work, row.layers, row.evicted = timing.summarise(seconds), work, layers, evicts
            if ceilings is not None:
                row.limit, row.binding = ceilings.limit(work, row.isa)
            if self.suite.baseline in taken and name != self.suite.baseline:
                row.comparison = timing.compare(seconds, taken[self.suite.baseline])
