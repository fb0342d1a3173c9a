"""Rounds of generation in which implementations take turns, and their times by phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from moe_cpu.benchmark.end_to_end.experts_clock import ExpertsClock
from moe_cpu.benchmark.end_to_end.generation import Generation, Span, generate
from moe_cpu.benchmark.end_to_end.report import Phase
from moe_cpu.benchmark.end_to_end.settings import Settings
from moe_cpu.benchmark.timing import compare, interleave, percentile, summarise

Taken = dict[str, list[Generation]]


def take(
    model: Any, clock: ExpertsClock, prompt: Tensor, feed: Tensor, settings: Settings, names: Sequence[str]
) -> Taken:
    """Generations of every implementation, as many of each and side by side, all fed the same tokens."""
    taken: Taken = {name: [] for name in names}

    def once(name: str, *_: Any) -> None:
        taken[name].append(generate(model, clock, prompt, settings.new_tokens, feed))

    interleave(
        {name: partial(once, name) for name in names},
        lambda: None,
        settings.seconds,
        before=model.set_experts_implementation,
        after=lambda _: None,
    )
    return {name: generations[1:] for name, generations in taken.items()}  # its first round warms up


def phases(taken: Taken, name: str, baseline: str, batch: int, prompt_tokens: int) -> list[Phase]:
    """Prefill and decode of one implementation beside the first."""
    return [
        _phase("prefill", batch * prompt_tokens, taken, name, baseline, lambda g: [g.prefill]),
        _phase("decode", batch, taken, name, baseline, lambda g: g.steps),
    ]


def _phase(
    kind: str,
    tokens: int,
    taken: Taken,
    name: str,
    baseline: str,
    spans_of: Callable[[Generation], list[Span]],
) -> Phase:
    mine, theirs = ([span for g in taken[n] for span in spans_of(g)] for n in (name, baseline))
    whole, experts = [span.seconds for span in mine], [span.experts for span in mine]
    phase = Phase(
        kind,
        tokens,
        summarise(whole),
        summarise(experts),
        percentile([span.experts / span.seconds for span in mine], 0.5),
    )
    if name != baseline:
        phase.whole_comparison = compare(whole, [span.seconds for span in theirs])
        phase.experts_comparison = compare(experts, [span.experts for span in theirs])
    return phase
