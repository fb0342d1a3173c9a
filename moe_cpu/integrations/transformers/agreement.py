"""How a model under "moe_cpu" is compared with the same model under transformers' own eager experts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moe_cpu.integrations.transformers.detect import is_experts_module
from moe_cpu.integrations.transformers.forward import NAME

# Roundings to bf16 along one decoder layer: two norms (2 each), projections, rotation (3), scores, softmax, values, output, gate and up, activation, product,
# down, weight, sum over topk, shared expert, its gate, two residual sums.
ROUNDINGS_PER_LAYER = 24
# The last norm, the head.
ROUNDINGS_AT_THE_END = 3


def bf16_bound(layers: int) -> float:
    """|logits - logits'| / |logits| of two bf16 runs of one model that compute some operation differently.

    Once they differ, each later rounding falls differently in each run, by at most u / sqrt 3 in the mean square with u = 2^-8, relative to a tensor that is at
    most as large as the residual stream it is added to. So the squares of 2 * (24 * layers + 3) such errors add up.
    """
    roundings = ROUNDINGS_PER_LAYER * layers + ROUNDINGS_AT_THE_END
    return math.sqrt(2 * roundings / 3) * 2.0**-8


@contextmanager
def recorded(model: Any, calls: list[tuple[Any, ...]], inputs: bool = True) -> Iterator[None]:
    """Appends (module, hidden states, ids, weights) of every call of an experts module; without `inputs`, None for the hidden states."""

    def put(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, *routing = (*args, *kwargs.values())
        calls.append((module, x.clone() if inputs else None, *(tensor.clone() for tensor in routing)))

    with _hooked(model, put):
        yield


@contextmanager
def replayed(model: Any, calls: list[tuple[Any, ...]]) -> Iterator[None]:
    """Routes as recorded: a difference in the last bit may flip a choice between two nearly equal experts, and then nothing is comparable."""
    remaining = iter(calls)

    def put(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (args or tuple(kwargs.values()))[:1] + next(remaining)[2:], {}

    with _hooked(model, put):
        yield


@contextmanager
def _hooked(model: Any, hook: Any) -> Iterator[None]:
    handles = [
        m.register_forward_pre_hook(hook, with_kwargs=True) for m in model.modules() if is_experts_module(m)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def logits_difference(
    model: Any, input_ids: torch.Tensor, implementation: str = NAME, other: str = "eager", last: bool = False
) -> float:
    """|logits - other logits| / |other logits| in the 2-norm, with the other's routing in both; the model is left under `implementation`.

    Args:
        input_ids: `[batch, length]` int64.
        last: compare the logits of the last position only, and spare the model the others.
    """
    calls: list[tuple[Any, ...]] = []
    options = last_logits_only(model) if last else {}
    model.set_experts_implementation(other)
    with recorded(model, calls, inputs=False):
        want = _logits(model, input_ids, options)
    model.set_experts_implementation(implementation)
    with replayed(model, calls):
        got = _logits(model, input_ids, options)
    return float((got - want).norm() / want.norm())


def last_logits_only(model: Any) -> dict[str, int]:
    """The argument that spares the logits of all positions but the last, where the model has it, as transformers' `generate` does."""
    known = inspect.signature(model.forward).parameters
    return {"logits_to_keep": 1} if "logits_to_keep" in known else {}


def _logits(model: Any, input_ids: torch.Tensor, options: dict[str, int]) -> torch.Tensor:
    return model(input_ids, **options).logits.float()


@torch.no_grad()
def greedy_tokens(model: Any, input_ids: torch.Tensor, implementation: str, new_tokens: int) -> torch.Tensor:
    """Greedy continuation `[batch, new_tokens]`; models without `generate` give the best class of each position."""
    model.set_experts_implementation(implementation)
    if not hasattr(model, "generate"):
        return model(input_ids).logits.argmax(-1)
    mask = torch.ones_like(input_ids)
    out = model.generate(
        input_ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
    )
    return out[:, input_ids.shape[1] :]
