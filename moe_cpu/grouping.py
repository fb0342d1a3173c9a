"""Which (token, slot) pairs belong to which local expert: the permutation that the plain-torch backends work in."""

from __future__ import annotations

import torch

from moe_cpu.checks import check_expert_ids
from moe_cpu.errors import expert_map_error, shape_error, token_count_error
from moe_cpu.tensor_checks import refuse_tracing


def local_expert_ids(topk_ids: torch.Tensor, E: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Local ids `[M, topk]` int64 of global `topk_ids`; -1 for no expert and for an expert on another rank.

    Raises: ExpertIdError for an id that is neither -1 nor an index into the map (without a map: below E), and for a map
    entry outside `[-1, E)`.
    """
    refuse_tracing()
    if expert_map is None:
        check_expert_ids(topk_ids, E)
        return topk_ids.long()
    check_expert_ids(topk_ids, expert_map.shape[0])
    if expert_map.numel() == 0:
        return topk_ids.long()
    low, high = torch.aminmax(expert_map)
    if int(low) < -1 or int(high) >= E:
        index = int(((expert_map < -1) | (expert_map >= E)).nonzero()[0])
        raise expert_map_error(index, int(expert_map[index]), E)
    ids = topk_ids.long()
    # A negative index would wrap around to a real expert, so -1 reads entry 0 and is then put back.
    return torch.where(ids < 0, -1, expert_map.long()[ids.clamp(min=0)])


def group_by_expert(local_ids: torch.Tensor, E: int) -> tuple[torch.Tensor, list[int]]:
    """Pairs sorted by expert: flat positions (token * topk + slot) `[pairs]` int64, ascending within an expert, and the
    number of pairs of each of the E experts. Pairs with id -1 are left out."""
    flat = local_ids.reshape(-1)
    counts: list[int] = torch.bincount(flat + 1, minlength=E + 1).tolist()
    order = torch.argsort(flat, stable=True)
    return order[counts[0] :], counts[1:]


def rows_of_experts(expert_num_tokens: torch.Tensor | None, E: int, max_num_tokens: int) -> list[int]:
    """Real rows of each expert of a batched input; without counts every row is real.

    Raises: ShapeError, and ArgumentError for a count outside `[0, max_num_tokens]`.
    """
    if expert_num_tokens is None:
        return [max_num_tokens] * E
    if tuple(expert_num_tokens.shape) != (E,):
        raise shape_error("expert_num_tokens", "[E]", (E,), expert_num_tokens.shape)
    rows: list[int] = expert_num_tokens.tolist()
    for expert, count in enumerate(rows):
        if not 0 <= count <= max_num_tokens:
            raise token_count_error(expert, count, max_num_tokens)
    return rows
