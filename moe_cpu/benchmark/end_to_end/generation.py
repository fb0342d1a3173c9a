"""One prompt and the tokens after it, timed step by step."""

from __future__ import annotations

import inspect
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_cpu.benchmark.end_to_end.experts_clock import ExpertsClock
from moe_cpu.integrations.transformers.agreement import last_logits_only


class Span(NamedTuple):
    """Seconds of one call of the model, and how many of them its experts took."""

    seconds: float
    experts: float


class Generation(NamedTuple):
    """Prefill (until the first token is chosen), decode steps, and the greedy choices `[batch, 1 + steps]`."""

    prefill: Span
    steps: list[Span]
    choices: Tensor


@torch.no_grad()
def generate(
    model: Any, clock: ExpertsClock, prompt: Tensor, steps: int, feed: Tensor | None = None
) -> Generation:
    """Runs a prompt through a model with a fresh cache of keys and values, and then one token after the other.

    Args:
        prompt: `[batch, length]` int64, no padding.
        steps: tokens after the first.
        feed: `[batch, at least steps]` tokens to go on with; None goes on with the model's own choices.
    Returns: times and, at every position, the token with the largest logit, whether it was fed or not.
    """
    only_last, cache_name = last_logits_only(model), _cache_name(model)
    clock.take()

    def call(tokens: Tensor, cache: Any) -> tuple[Span, Tensor, Any]:
        start = time.perf_counter()
        out = model(input_ids=tokens, use_cache=True, **{cache_name: cache}, **only_last)
        choice = out.logits[:, -1].argmax(-1, keepdim=True)
        return Span(time.perf_counter() - start, clock.take()), choice, getattr(out, cache_name)

    prefill, choice, cache = call(prompt, None)
    choices, spans = [choice], []
    for step in range(steps):
        tokens = choice if feed is None else feed[:, step : step + 1]
        span, choice, cache = call(tokens, cache)
        spans.append(span)
        choices.append(choice)
    return Generation(prefill, spans, torch.cat(choices, 1))


def _cache_name(model: Any) -> str:
    """What the model calls its cache of keys and values, which newer releases of transformers have renamed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
