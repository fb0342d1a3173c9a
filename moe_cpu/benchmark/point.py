"""Measures all contenders at one shape, routing and number of tokens: check, then time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_cpu import isa
from moe_cpu.benchmark import check, roofline, timing
from moe_cpu.benchmark.case import Case, Suite
from moe_cpu.benchmark.contender import Contender
from moe_cpu.benchmark.inputs import DenseLayer, Inputs, Source, generator
from moe_cpu.benchmark.report import FAILED, OK, SKIPPED, WRONG, Row
from moe_cpu.models import ModelShape


@dataclass(frozen=True)
class Session:
    """What all points of a run share. `cache` is the size of the last-level cache, 0 for a suite that is not cold."""

    suite: Suite
    source: Source
    threads: int
    contenders: list[Contender]
    ceilings: roofline.Ceilings | None
    evict: timing.CacheEvictor
    cache: int


@dataclass(frozen=True)
class Weights:
    """Layers of one shape: the first one dense, for checking, each contender's own form of all of them, and why a contender could not make its own."""

    first: DenseLayer
    prepared: dict[str, list[Any]]
    failures: dict[str, str]
    layers: int


def measure(session: Session, weights: Weights, shape: ModelShape, routing: str, M: int) -> list[Row]:
    """One row for each contender, in the suite's order. A wrong answer, an exception or a refusal gets a reason and no time."""
    return _Point(session, weights, shape, routing, M).rows()


@dataclass
class _Point:
    session: Session
    weights: Weights
    shape: ModelShape
    routing: str
    M: int

    def __post_init__(self) -> None:
        self.rng: torch.Generator = generator(self.session.suite.seed * 1_000_003 + self.M)

    def rows(self) -> list[Row]:
        contenders = self.session.contenders
        rows = {c.name: self._row(c) for c in contenders}
        self._check([c for c in contenders if rows[c.name].status == OK], rows)
        fit = {c.name: c for c in contenders if rows[c.name].status == OK}
        if fit:
            self._time(fit, rows)
        return list(rows.values())

    def _row(self, contender: Contender) -> Row:
        suite = self.session.suite
        case = Case(
            self.shape, self.M, contender.name, suite.scheme, self.session.threads, self.routing, suite.seed
        )
        reason = contender.why_not(self.shape)
        if reason is None and contender.max_tokens is not None and self.M > contender.max_tokens:
            reason = f"takes at most {contender.max_tokens} tokens a call"
        native = contender.ours and contender.name.startswith("native")
        row = Row(
            case, contender.isa or (isa.active() if native and isa.available() else None), contender.ours
        )
        if reason is not None:
            row.status, row.reason = SKIPPED, reason
        elif contender.name in self.weights.failures:
            row.status, row.reason = FAILED, self.weights.failures[contender.name]
        return row

    def _new_inputs(self) -> Inputs:
        return self.session.source.make_inputs(
            self.shape, self.M, self.routing, self.rng, self.session.suite.seed
        )

    def _check(self, contenders: list[Contender], rows: dict[str, Row]) -> None:
        inputs = self._new_inputs()
        sample = check.sample_tokens(self.M, self.rng)
        want = check.expected(self.weights.first, inputs, self.shape, sample)
        for contender in contenders:
            row = rows[contender.name]
            # A competitor may write into its inputs, which must not become the next one's problem.
            own = Inputs(*(t.clone() for t in inputs))
            prepared = self.weights.prepared[contender.name][0]
            try:
                with contender.active():
                    got = contender.run(prepared, own, self.shape)
            except Exception as error:
                row.status, row.reason = FAILED, f"{type(error).__name__}: {error}"
                continue
            row.relative_error, reason = check.verdict(got, sample, want)
            if reason is not None:
                row.status, row.reason = WRONG, reason
            else:
                with contender.active():
                    row.scratch = contender.scratch_bytes(prepared, own, self.shape)
            time.sleep(contender.settle)

    def _time(self, contenders: dict[str, Contender], rows: dict[str, Row]) -> None:
        session, layers = self.session, self.weights.layers
        works: list[roofline.Work] = []
        states = {name: contextlib.ExitStack() for name in contenders}

        def new_inputs() -> Inputs:
            inputs = self._new_inputs()
            works.append(roofline.routed_work(self.shape, inputs.topk_ids))
            return inputs

        # A call finds in the cache what was read since the last call on its layer. Where that is too little to have replaced the layer's own
        # weights, the cache is emptied before each call.
        between = layers * roofline.routed_work(self.shape, self._new_inputs().topk_ids).bytes
        evicts = between < 2 * session.cache

        def before(name: str) -> None:
            if evicts:
                session.evict()
            states[name].enter_context(contenders[name].active())

        def after(name: str) -> None:
            states[name].close()
            if contenders[name].settle:
                time.sleep(contenders[name].settle)

        def call(name: str) -> Callable[[Any, int], Any]:
            run, prepared = contenders[name].run, self.weights.prepared[name]
            return lambda inputs, number: run(prepared[number % layers], inputs, self.shape)

        calls = {name: call(name) for name in contenders}
        taken = timing.interleave(calls, new_inputs, session.suite.seconds, before, after)
        work = roofline.median_work(works[1:])  # the first round was not timed
        baseline = session.suite.baseline
        for name, seconds in taken.items():
            row = rows[name]
            row.times, row.work, row.layers, row.evicted = timing.summarise(seconds), work, layers, evicts
            if session.ceilings is not None:
                row.limit, row.binding = session.ceilings.limit(work, row.isa)
            if baseline in taken and name != baseline:
                row.comparison = timing.compare(seconds, taken[baseline])
