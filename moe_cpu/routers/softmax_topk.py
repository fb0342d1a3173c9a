"""Softmax over all experts, then the topk best: Mixtral, Qwen-MoE, OLMoE and, with `renormalize`, gpt-oss."""

from __future__ import annotations

import torch

from moe_cpu.routers.selection import Routing, float32_logits, largest


def softmax_topk(router_logits: torch.Tensor, topk: int, renormalize: bool = True) -> Routing:
    """p = softmax(router_logits); ids are the topk largest logits, weights their p, divided by their sum if `renormalize`.

    Args:
        router_logits: `[M, E]` bf16, fp16 or fp32.
        topk: experts per token, 1 <= topk <= E.
        renormalize: make each token's weights sum to one (Mixtral; Qwen3-MoE with norm_topk_prob). Softmax over the
            topk logits alone (gpt-oss) is the same thing.
    Returns: `Routing`, weights `[M, topk]` float32 and ids `[M, topk]` int32, best first, lowest id first among equals.
    Raises: ShapeError, DTypeError, ArgumentError.
    Numerics: float32 throughout; equal logits are compared as they came, so rounding inside softmax makes no ties.
    Source: Mixtral (arXiv:2401.04088) section 2.1; without `renormalize`, OLMoE (arXiv:2409.02060).
    """
    logits = float32_logits(router_logits, topk)
    ids = largest(logits, topk)
    weights = torch.softmax(logits, dim=-1).gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(weights, ids.int())
