"""The best expert alone, weighted on the input: Llama 4."""

from __future__ import annotations

import torch

from moe_cpu.routers.selection import Routing, float32_logits, largest


def sigmoid_top1(router_logits: torch.Tensor) -> Routing:
    """id = argmax(router_logits), weight = sigmoid of that logit.

    The weight belongs on the expert's input: call `fused_experts(..., apply_router_weight_on_input=True)`.

    Args:
        router_logits: `[M, E]` bf16, fp16 or fp32.
    Returns: `Routing`, weights `[M, 1]` float32 and ids `[M, 1]` int32, lowest id first among equals.
    Raises: ShapeError, DTypeError, ArgumentError.
    Numerics: float32; logits are compared as they came, so the sigmoid's rounding makes no ties.
    Source: the router of Llama 4, as Hugging Face transformers implements it (`Llama4Router`).
    """
    logits = float32_logits(router_logits, 1)
    ids = largest(logits, 1)
    return Routing(torch.sigmoid(logits.gather(1, ids)), ids.int())
