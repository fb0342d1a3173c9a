"""Sorting ids by expert on the CPU, by the native library. Functions here trust their callers (`moe_cpu.align`)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moe_cpu import native_library as native
from moe_cpu import ops
from moe_cpu.errors import no_memory_error


def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The native routine behind `moe_cpu.moe_align_block_size`, for CPU tensors."""
    lib = native.library()
    tokens, topk = topk_ids.shape
    length = aligned_length(tokens * topk, block_size, num_experts, pad_sorted_ids)
    blocks = -(-length // block_size)
    sorted_ids = torch.empty(length, dtype=torch.int32)
    expert_ids = torch.empty(blocks, dtype=torch.int32)
    post_pad = torch.empty(1, dtype=torch.int32)
    if not (sorted_ids.data_ptr() or length == 0) or not (topk_ids.data_ptr() or topk_ids.numel() == 0):
        raise no_memory_error("moe_align_block_size")
    threads = torch.get_num_threads()
    mine = ops.borrow()
    try:
        needed = _scratch_bytes(tokens * topk, length, num_experts, threads)
        if needed > mine.scratch_bytes:
            mine.grow(needed)
        status = lib.moe_align_block_size(
            topk_ids.data_ptr(), native.DTYPE_CODES[topk_ids.dtype], tokens, topk, topk_ids.stride(0), topk_ids.stride(1),
            block_size, num_experts, None if expert_map is None else expert_map.data_ptr(), length, blocks,
            sorted_ids.data_ptr(), expert_ids.data_ptr(), post_pad.data_ptr(), mine.scratch_address, threads, mine.info_address,
        )  # fmt: skip
        if status != native.OK:
            raise native.failure(status, mine.info, "moe_align_block_size", topk)
    finally:
        mine.busy = False
    return sorted_ids, expert_ids, post_pad


@functools.lru_cache
def _scratch_bytes(numel: int, length: int, num_experts: int, threads: int) -> int:
    return int(native.library().moe_align_scratch_bytes(numel, length, num_experts, threads))


def aligned_length(numel: int, block_size: int, num_experts: int, pad_sorted_ids: bool) -> int:
    """Length of `sorted_token_ids`: every expert may waste block_size - 1 places."""
    length = numel + num_experts * (block_size - 1)
    return -(-length // block_size) * block_size if pad_sorted_ids else length
