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
    expert_map: torch.Tensor | None = None,
) -> None:
    """output[m] = sum over s of topk_weights[m, s] * expert_output[m, s]; weights are ones when they went on the input.

    Args:
        output: `[M, K]`, written; must not overlap `expert_output`.
        expert_output: `[M, topk, K]`; a slot without an expert here (id -1, or one that `expert_map` sends to -1) adds exactly zero, whatever it
            and its weight hold.
        topk_weights, topk_ids: `[M, topk]`.
        expert_map: `[global_num_experts]` when the ids are global ones.
    Numerics: products and sum in float32 (float64 for float64), slots in order, one rounding to the dtype of `output`.
    """
    M, topk, K = expert_output.shape
    dtype = accumulation_dtype(output, expert_output)
    skipped = without_expert(topk_ids, expert_map)
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


def without_expert(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """`[M, topk]` bool, True where a pair has no expert here. Nothing waits for a GPU; ids out of range are for the experts to refuse."""
    skipped = topk_ids < 0
    if expert_map is None or expert_map.numel() == 0:
        return skipped
    return skipped | (expert_map[topk_ids.clamp(0, expert_map.numel() - 1).long()] < 0)


def weight_input(hidden_states: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """`hidden_states [M, K] * topk_weights [M, 1]`, product in float32 (float64 for float64), rounded once; a new tensor."""
    dtype = accumulation_dtype(hidden_states)
    return (hidden_states.to(dtype) * topk_weights.to(dtype)).to(hidden_states.dtype)
