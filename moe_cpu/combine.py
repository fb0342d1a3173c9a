"""Router weights in plain torch: on the output, with the sum over topk, or on the input."""

from __future__ import annotations

import torch

# Elements of one temporary of the weighted sum: 1 MiB of float32 stays in a core's second-level cache.
_CHUNK_ELEMENTS = 1 << 18


def accumulation_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """float64 as soon as one tensor is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def weight_and_reduce(
    output: torch.Tensor,
    expert_output: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    apply_router_weight_on_input: bool,
) -> None:
    """output[m] = sum over s of topk_weights[m, s] * expert_output[m, s]; weights are ones when they went on the input.

    Args:
        output: `[M, K]`, written; must not overlap `expert_output`.
        expert_output: `[M, topk, K]`; what stands in a slot whose id is -1 is not read into the sum.
        topk_weights, topk_ids: `[M, topk]`.
    Numerics: products and sum in float32 (float64 for float64), slots in order, one rounding to the dtype of `output`.
    """
    M, topk, K = expert_output.shape
    dtype = accumulation_dtype(output, expert_output)
    skipped = topk_ids < 0
    any_skipped = bool(skipped.any())
    rows = max(1, _CHUNK_ELEMENTS // max(K, 1))
    for start in range(0, M, rows):
        chunk = slice(start, start + rows)
        total = torch.zeros(output[chunk].shape, dtype=dtype, device=output.device)
        for slot in range(topk):
            term = expert_output[chunk, slot].to(dtype)
            if not apply_router_weight_on_input:
                term = term * topk_weights[chunk, slot, None].to(dtype)
            if any_skipped:
                term = term.masked_fill(skipped[chunk, slot, None], 0.0)
            total = total + term
        output[chunk].copy_(total)


def weight_input(hidden_states: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """`hidden_states [M, K] * topk_weights [M, 1]`, product in float32 (float64 for float64), rounded once; a new tensor."""
    dtype = accumulation_dtype(hidden_states)
    return (hidden_states.to(dtype) * topk_weights.to(dtype)).to(hidden_states.dtype)
