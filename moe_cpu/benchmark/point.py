"""Measures all contenders and routings at one shape and number of tokens: check, then time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moe_cpu import isa
from moe_cpu.benchmark import check, roofline, timing
from moe_cpu.benchmark.case import Case, Suite
from moe_cpu.benchmark.contender import Contender
from moe_cpu.benchmark.inputs import DenseLayer, Inputs, Source, generator
from moe_cpu.benchmark.report import FAILED, OK, SKIPPED, WRONG, Row, Skew
from moe_cpu.models import ModelShape


@dataclass(frozen=True)
class Session:
    """What all points of a run share. `ceilings` are by number of threads; `cache` is the size of the last-level cache, 0 for a suite that is not cold."""

    suite: Suite
    source: Source
    contenders: list[Contender]
    ceilings: dict[int, roofline.Ceilings]
    evict: timing.CacheEvictor
    cache: int


@dataclass(frozen=True)
class Weights:
    """Layers of one shape: the first one dense, for checking, each contender's own form of all of them, and why a contender could not make its own."""

    first: DenseLayer
    prepared: dict[str, list[Any]]
    failures: dict[str, str]
    layers: int


def measure(session: Session, weights: Weights, shape: ModelShape, M: int) -> list[Row]:
    """One row for each routing and contender, in the suite's order, with torch's number of threads. A wrong answer, an exception or a refusal gets a reason and no time."""
    return _Point(session, weights, shape, M).measured()


class _Key(NamedTuple):
    """Whose calls, and with which routing: all of a point take turns."""

    routing: str
    contender: str


class _Point:
    def __init__(self, session: Session, weights: Weights, shape: ModelShape, M: int) -> None:
        self.session, self.weights, self.shape, self.M = session, weights, shape, M
        self.suite, self.threads = session.suite, torch.get_num_threads()
        self.rng: torch.Generator = generator(self.suite.seed * 1_000_003 + M)
        self.contenders = {c.name: c for c in session.contenders}
        self.rows = {
            _Key(routing, c.name): self._row(routing, c)
            for routing in self.suite.routings
            for c in session.contenders
        }

    def measured(self) -> list[Row]:
        for routing in self.suite.routings:
            self._check(routing)
        keys = [key for key, row in self.rows.items() if row.status == OK]
        if keys:
            self._time(keys)
        return list(self.rows.values())

    def _row(self, routing: str, contender: Contender) -> Row:
        suite = self.suite
        case = Case(self.shape, self.M, contender.name, suite.scheme, self.threads, routing, suite.seed)
        reason = contender.why_not(self.shape)
        if reason is None and contender.max_tokens is not None and self.M > contender.max_tokens:
            reason = f"takes at most {contender.max_tokens} tokens a call"
        if reason is None and contender.fixed_threads and len(suite.thread_counts) > 1:
            reason = (
                "keeps the threads that it began with, so it cannot be measured with several numbers of them"
            )
        native = contender.ours and contender.name.startswith("native")
        row = Row(
            case, contender.isa or (isa.active() if native and isa.available() else None), contender.ours
        )
        if reason is not None:
            row.status, row.reason = SKIPPED, reason
        elif contender.name in self.weights.failures:
            row.status, row.reason = FAILED, self.weights.failures[contender.name]
        return row

    def _new_inputs(self, routing: str) -> Inputs:
        return self.session.source.make_inputs(self.shape, self.M, routing, self.rng, self.suite.seed)

    def _check(self, routing: str) -> None:
        inputs = self._new_inputs(routing)
        sample = check.sample_tokens(self.M, self.rng)
        want = check.expected(self.weights.first, inputs, self.shape, sample)
        for contender in self.session.contenders:
            row = self.rows[_Key(routing, contender.name)]
            if row.status != OK:
                continue
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

    def _time(self, keys: list[_Key]) -> None:
        session, layers, routings = self.session, self.weights.layers, self.suite.routings
        works: dict[str, list[roofline.Work]] = {routing: [] for routing in routings}
        states = {name: contextlib.ExitStack() for name in self.contenders}

        def new_inputs() -> dict[str, Inputs]:
            drawn = {routing: self._new_inputs(routing) for routing in routings}
            for routing, inputs in drawn.items():
                works[routing].append(roofline.routed_work(self.shape, inputs.topk_ids))
            return drawn

        # A call finds in the cache what was read since the last call on its layer. Where that is too little to have replaced the layer's own
        # weights, the cache is emptied before each call.
        new_inputs()
        evicts = layers * min(read[0].bytes for read in works.values()) < 2 * session.cache

        def before(key: _Key) -> None:
            if evicts:
                session.evict()
            states[key.contender].enter_context(self.contenders[key.contender].active())

        def after(key: _Key) -> None:
            states[key.contender].close()
            if self.contenders[key.contender].settle:
                time.sleep(self.contenders[key.contender].settle)

        def call(key: _Key) -> Callable[[Any, int], Any]:
            run, prepared = self.contenders[key.contender].run, self.weights.prepared[key.contender]
            turn = routings.index(key.routing)
            return lambda drawn, number: run(
                prepared[(number * len(routings) + turn) % layers], drawn[key.routing], self.shape
            )

        calls = {key: call(key) for key in keys}
        taken = timing.interleave(calls, new_inputs, self.suite.seconds * len(routings), before, after)
        for key in keys:
            row = self.rows[key]
            # Neither the draw above nor the first round was timed.
            row.times, row.work = timing.summarise(taken[key]), roofline.median_work(works[key.routing][2:])
            row.layers, row.evicted = layers, evicts
            if self.threads in session.ceilings:
                row.limit, row.binding = session.ceilings[self.threads].limit(row.work, row.isa)
        for key in keys:
            self._compare(key, taken)

    def _compare(self, key: _Key, taken: dict[_Key, list[float]]) -> None:
        row, baseline = self.rows[key], _Key(key.routing, self.suite.baseline)
        if baseline in taken and key != baseline:
            row.comparison = timing.compare(taken[key], taken[baseline])
        uniform = _Key("uniform", key.contender)
        limit = self.rows[uniform].limit if uniform in taken and key != uniform else None
        if row.limit is not None and limit is not None:
            row.skew = Skew(timing.compare(taken[uniform], taken[key]), row.limit / limit)
