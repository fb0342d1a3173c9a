"""Grouping tokens by expert into padded blocks."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from moe_cpu import align_ops, ops
from moe_cpu.checks import ID_DTYPES, check_count, check_expert_ids
from moe_cpu.errors import ArgumentError, device_error, dtype_error, shape_error
from moe_cpu.int32 import as_int32
from moe_cpu.tensor_checks import refuse_tracing

_LIMIT = 2**31


def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    *,
    check_ids: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the flattened `topk_ids` by expert, stably, and pads every expert's run to a multiple of `block_size`.

    Args:
        topk_ids: `[M, topk]` int32 or int64, any strides; ids in [0, num_experts), -1 = no expert (left out). On the device "meta" the results have no memory.
        block_size: rows of one block, at least 1.
        num_experts: global number of experts.
        expert_map: `[num_experts]` int32 or int64, global to local id, -1 = on another rank.
        pad_sorted_ids: round the length of the first result up to a multiple of `block_size`.
        check_ids: for CUDA tensors, whose ids the host does not see: wait for the GPU and refuse an id out of range, which is left out like -1
            otherwise. CPU tensors are always checked.

    Returns:
        sorted_token_ids: `[numel + num_experts * (block_size - 1)]` int32; flat positions in `topk_ids` (token * topk + slot), padding =
            `topk_ids.numel()`, also past `num_tokens_post_pad`.
        expert_ids: `[ceil(len(sorted_token_ids) / block_size)]` int32, the expert of each block, 0 past the last used one; with `expert_map`
            every entry is then replaced by its local id, so a remote expert's block reads -1.
        num_tokens_post_pad: `[1]` int32, a multiple of `block_size`.

    Raises:
        ShapeError, DTypeError, DeviceError: with the expected and the given values.
        ExpertIdError: an id outside [0, num_experts) other than -1, or a map entry that int32 does not hold, with its position.
        ArgumentError: `block_size` or `num_experts` below 1, or a result of 2^31 entries or more.

    Numerics: exact; the same for any number of threads, and on CPU and GPU. The host does not wait for the GPU (but where Triton is missing, so that
    plain torch sorts there).
    Source: the semantics of vLLM 0.9.1's operation of this name; there, an id out of range is undefined.
    """
    if not isinstance(topk_ids, Tensor):
        raise ArgumentError(f"topk_ids: expected a tensor, got {type(topk_ids).__name__}")
    if topk_ids.dim() != 2:
        raise shape_error("topk_ids", "[M, topk]", (), topk_ids.shape, hint="one row per token")
    if topk_ids.dtype not in ID_DTYPES:
        raise dtype_error("topk_ids", "int32 or int64", topk_ids.dtype, "pass topk_ids.to(torch.int32)")
    block_size, num_experts = check_count("block_size", block_size), check_count("num_experts", num_experts)
    length = align_ops.aligned_length(topk_ids.numel(), block_size, num_experts, pad_sorted_ids)
    if length >= _LIMIT:
        raise ArgumentError(
            f"sorted_token_ids: numel + num_experts * (block_size - 1) = {topk_ids.numel()} + {num_experts} * {block_size - 1} = {length} "
            f"does not fit in int32 (limit {_LIMIT - 1}); split the tokens or use a smaller block_size"
        )
    if expert_map is not None:
        if not isinstance(expert_map, Tensor):
            raise ArgumentError(f"expert_map: expected a tensor, got {type(expert_map).__name__}")
        if tuple(expert_map.shape) != (num_experts,):
            raise shape_error("expert_map", "[num_experts]", (num_experts,), expert_map.shape)
        if expert_map.device != topk_ids.device:
            raise device_error("expert_map", topk_ids.device, expert_map.device, "topk_ids")
        if expert_map.dtype not in ID_DTYPES:
            raise dtype_error(
                "expert_map", "int32 or int64", expert_map.dtype, "pass expert_map.to(torch.int32)"
            )
    topk_ids = topk_ids.resolve_neg()
    if check_ids and topk_ids.is_cuda:
        check_expert_ids(topk_ids, num_experts)
    refuse_tracing()
    if topk_ids.is_meta or (torch.compiler.is_compiling() and (topk_ids.is_cuda or ops.available())):
        return torch.ops.moe_cpu.moe_align_block_size(
            topk_ids, block_size, num_experts, expert_map, pad_sorted_ids
        )
    if expert_map is not None:
        expert_map = as_int32("expert_map", expert_map)
    if topk_ids.is_cuda or (topk_ids.is_cpu and ops.available()):
        align = align_on_cuda if topk_ids.is_cuda else align_ops.moe_align_block_size
        return align(topk_ids, block_size, num_experts, expert_map, pad_sorted_ids)
    return _align_in_torch(topk_ids, block_size, num_experts, expert_map, length)


def align_on_cuda(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Tensor | None, pad_sorted_ids: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_align_block_size` of checked arguments on the GPU, by Triton where it is installed."""
    length = align_ops.aligned_length(topk_ids.numel(), block_size, num_experts, pad_sorted_ids)
    if find_spec("triton") is None:
        return _align_in_torch(topk_ids, block_size, num_experts, expert_map, length)
    from moe_cpu import align_triton

    return align_triton.align(topk_ids, block_size, num_experts, expert_map, length)


def _align_in_torch(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Tensor | None, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain torch, for any device."""
    check_expert_ids(topk_ids, num_experts)
    ids = topk_ids.reshape(-1).long()
    positions = torch.argsort(ids, stable=True)
    positions = positions[int((ids < 0).sum()) :]
    counts = torch.bincount(ids[ids >= 0], minlength=num_experts)
    padded = (counts + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    # Each run moves from its place in the sorted list to the start of its expert's first block.
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    sorted_ids = torch.full((length,), ids.numel(), dtype=torch.int32, device=ids.device)
    sorted_ids[torch.arange(positions.numel(), device=ids.device) + shift[ids[positions]]] = positions.to(
        torch.int32
    )
    expert_ids = torch.zeros(-(-length // block_size), dtype=torch.int32, device=ids.device)
    owners = torch.repeat_interleave(torch.arange(num_experts, device=ids.device), padded // block_size)
    expert_ids[: owners.numel()] = owners.to(torch.int32)
    if expert_map is not None:
        expert_ids = expert_map[expert_ids.long()]
    return sorted_ids, expert_ids, ends[-1:].to(torch.int32)
