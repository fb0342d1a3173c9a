"""Feeding one expert at a time: shared by the backends whose kernel is a plain matrix product."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moe_cpu.errors import shape_error
from moe_cpu.grouping import group_by_expert, rows_of_experts

# expert(e, x [rows, K]) -> [rows, K]
Expert = Callable[[int, torch.Tensor], torch.Tensor]


def run_routed(
    expert: Expert, E: int, hidden_states: torch.Tensor, local_ids: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """out[m, s] = expert(local_ids[m, s], hidden_states[m]), zero where the id is -1; experts without tokens are not run.

    Args:
        hidden_states: `[M, K]`.
        local_ids: `[M, topk]` int64 in `[-1, E)`.
        out: `[M, topk, K]` contiguous, any content.
    """
    pairs, counts = group_by_expert(local_ids, E)
    out.zero_()
    if pairs.numel() == 0:
        return out
    topk = local_ids.shape[1]
    results = [
        expert(e, hidden_states.index_select(0, mine // topk))
        for e, mine in enumerate(pairs.split(counts))
        if mine.numel()
    ]
    return out.view(-1, out.shape[-1]).index_copy_(0, pairs, torch.cat(results)).view(out.shape)


def run_batched(
    expert: Expert,
    E: int,
    hidden_states: torch.Tensor,
    expert_num_tokens: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """out[e, i] = expert(e, hidden_states[e, i]) for i < expert_num_tokens[e], zero in the other rows.

    Args:
        hidden_states: `[E, max_num_tokens, K]`; rows past an expert's count are not read.
        expert_num_tokens: `[E]`; None: every row is real.
        out: `[E, max_num_tokens, K]` contiguous, any content.
    Raises: ShapeError, ArgumentError.
    """
    if tuple(hidden_states.shape) != tuple(out.shape) or hidden_states.shape[0] != E:
        expected = (E, *out.shape[1:])
        raise shape_error("hidden_states", "[E, max_num_tokens, K]", expected, hidden_states.shape)
    out.zero_()
    for e, rows in enumerate(rows_of_experts(expert_num_tokens, E, hidden_states.shape[1])):
        if rows:
            out[e, :rows] = expert(e, hidden_states[e, :rows])
    return out


def result_memory(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, workspace: torch.Tensor | None
) -> torch.Tensor:
    """The front of `workspace` in that shape, or new memory when it is None, too small, not contiguous or of another dtype."""
    numel = torch.Size(shape).numel()
    if (
        workspace is None
        or workspace.dtype != dtype
        or workspace.numel() < numel
        or not workspace.is_contiguous()
    ):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return workspace.view(-1)[:numel].view(tuple(shape))
