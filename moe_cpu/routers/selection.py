"""The largest entries of each row, with a defined order among equals."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_cpu.errors import ArgumentError, dtype_error, shape_error


class Routing(NamedTuple):
    """topk_weights: `[M, topk]` float32. topk_ids: `[M, topk]` int32, best expert first."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the `count` largest entries of each row, largest first, lowest column first among equals: `[M, count]` int64.

    `torch.topk` promises no order among equals, so the same logits could be routed differently from one machine, batch
    size or thread count to the next. NaN counts as the largest.
    """
    return torch.sort(scores.detach(), dim=-1, descending=True, stable=True).indices[:, :count]


def float32_logits(router_logits: torch.Tensor, topk: int) -> torch.Tensor:
    """`router_logits [M, E]` in float32 (exact for bf16 and fp16). Raises ShapeError, DTypeError, ArgumentError."""
    if router_logits.dim() != 2:
        raise shape_error("router_logits", "[M, E]", (), router_logits.shape)
    if not router_logits.is_floating_point():
        raise dtype_error("router_logits", "bf16, fp16 or fp32", router_logits.dtype)
    E = router_logits.shape[1]
    if not 1 <= topk <= E:
        raise ArgumentError(f"topk: expected 1 <= topk <= E = {E}, got {topk}")
    return router_logits.float()


def normalized(weights: torch.Tensor) -> torch.Tensor:
    """Rows divided by their sum; the tiny term only keeps a row of zeros from becoming NaN."""
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
