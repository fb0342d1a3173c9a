"""`moe_align_block_size` on the GPU: a stable counting sort without a synchronisation.

Few ids: one kernel, a program for each expert, which counts all ids itself and so needs to hear nothing from the others.
Many ids: three kernels. Each part of the ids is counted; each expert's program adds up where its run starts and where each part's share of the run does;
each part then writes its ids, placed by their rank among equal ids of the part. Ranks come from comparisons, not from atomics, so the order is stable.

The host cannot see an id without waiting for the GPU, so an id out of range is left out like -1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Ids compared with each other at a time, and ids that one program counts at a time.
_STEP, _PART = 128, 1024
# Ids up to which every expert's program may count them all: four parts, some microseconds.
_ONE_KERNEL = 4096


@triton.jit
def _load(ids_ptr, map_ptr, position, numel, num_ids, E, MAPPED: tl.constexpr):
    """Experts of some positions, E for those to leave out."""
    id = tl.load(ids_ptr + position, mask=position < numel, other=-1)
    known = (id >= 0) & (id < num_ids)
    if MAPPED:
        id = tl.load(map_ptr + id, mask=known, other=-1)
        known = (id >= 0) & (id < E)
    return tl.where(known, id, E).to(tl.int32)


@triton.jit
def _fill(pointer, start, end, value, WIDTH: tl.constexpr):
    for at in range(start, end, WIDTH):
        place = at + tl.arange(0, WIDTH)
        tl.store(pointer + place, tl.zeros((WIDTH,), dtype=tl.int32) + value, mask=place < end)


@triton.jit
def _finish(
    expert, counts, sorted_ptr, experts_ptr, used_ptr, names_ptr, numel, length, num_blocks, size, E,
    NAMED: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Writes everything about an expert's run but its ids: padding, block experts, and a share of what lies past the used part. Returns its start."""
    which = tl.arange(0, EXPERTS)
    padded = (counts + size - 1) // size * size
    start = tl.sum(tl.where(which < expert, padded, 0), 0)
    mine = tl.sum(tl.where(which == expert, counts, 0), 0)
    end = start + (mine + size - 1) // size * size
    used = tl.sum(padded, 0)
    name, rest_name = expert, 0
    if NAMED:
        name = tl.load(names_ptr + expert).to(tl.int32)
        rest_name = tl.load(names_ptr).to(tl.int32)
    _fill(sorted_ptr, start + mine, end, numel, 128)
    _fill(experts_ptr, start // size, end // size, name, 128)
    share = tl.cdiv(length - used, E)
    _fill(sorted_ptr, used + expert * share, tl.minimum(used + (expert + 1) * share, length), numel, 128)
    share = tl.cdiv(num_blocks - used // size, E)
    first = used // size + expert * share
    _fill(experts_ptr, first, tl.minimum(first + share, num_blocks), rest_name, 128)
    tl.store(used_ptr, used, mask=expert == 0)
    return start


@triton.jit(do_not_specialize=["numel", "num_ids", "E", "length", "num_blocks"])
def _align_in_one(
    ids_ptr, map_ptr, names_ptr, sorted_ptr, experts_ptr, used_ptr, numel, num_ids, length, num_blocks, size, E,
    MAPPED: tl.constexpr, NAMED: tl.constexpr, EXPERTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    which = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    for at in range(0, numel, PART):
        id = _load(ids_ptr, map_ptr, at + tl.arange(0, PART), numel, num_ids, E, MAPPED)
        counts += tl.histogram(id, EXPERTS)
    counts = tl.where(which < E, counts, 0)
    place = _finish(
        expert, counts, sorted_ptr, experts_ptr, used_ptr, names_ptr, numel, length, num_blocks, size, E, NAMED, EXPERTS
    )  # fmt: skip
    for at in range(0, numel, PART):
        position = at + tl.arange(0, PART)
        mine = (_load(ids_ptr, map_ptr, position, numel, num_ids, E, MAPPED) == expert).to(tl.int32)
        tl.store(sorted_ptr + place + tl.cumsum(mine, 0) - 1, position, mask=mine > 0)
        place += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["numel", "num_ids", "E"])
def _count(
    ids_ptr, map_ptr, counts_ptr, numel, num_ids, E,
    MAPPED: tl.constexpr, PART: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """counts[part, e]."""
    part = tl.program_id(0)
    id = _load(ids_ptr, map_ptr, part * PART + tl.arange(0, PART), numel, num_ids, E, MAPPED)
    tl.store(counts_ptr + part * EXPERTS + tl.arange(0, EXPERTS), tl.histogram(id, EXPERTS))


@triton.jit(do_not_specialize=["parts", "numel", "length", "num_blocks", "E"])
def _offsets(
    counts_ptr, offsets_ptr, names_ptr, sorted_ptr, experts_ptr, used_ptr, parts, numel, length, num_blocks, size, E,
    NAMED: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """offsets[part, e] = where the ids of expert e that lie in that part start."""
    expert = tl.program_id(0)
    which = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)
        mask = (part < parts)[:, None] & (which < E)[None, :]
        counts += tl.sum(
            tl.load(counts_ptr + part[:, None] * EXPERTS + which[None, :], mask=mask, other=0), 0
        )
    place = _finish(
        expert, counts, sorted_ptr, experts_ptr, used_ptr, names_ptr, numel, length, num_blocks, size, E, NAMED, EXPERTS
    )  # fmt: skip
    for first in range(0, parts, STEP):
        part = first + tl.arange(0, STEP)
        mine = tl.load(counts_ptr + part * EXPERTS + expert, mask=part < parts, other=0)
        tl.store(offsets_ptr + part * EXPERTS + expert, place + tl.cumsum(mine, 0) - mine, mask=part < parts)
        place += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["numel", "num_ids", "E"])
def _scatter(
    ids_ptr, map_ptr, offsets_ptr, sorted_ptr, numel, num_ids, E,
    MAPPED: tl.constexpr, PART: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Program (part, step): writes STEP ids of a part, each at its part's offset plus the number of equal ids before it."""
    part, step = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, STEP)
    start = part * PART
    position = start + step * STEP + lane
    id = _load(ids_ptr, map_ptr, position, numel, num_ids, E, MAPPED)
    rank = tl.zeros((STEP,), dtype=tl.int32)
    for before in range(0, step):
        other = _load(ids_ptr, map_ptr, start + before * STEP + lane, numel, num_ids, E, MAPPED)
        rank += tl.sum((other[None, :] == id[:, None]).to(tl.int32), 1)
    same = (id[None, :] == id[:, None]) & (lane[None, :] < lane[:, None])
    rank += tl.sum(same.to(tl.int32), 1)
    offset = tl.load(offsets_ptr + part * EXPERTS + id, mask=id < E, other=0)
    tl.store(sorted_ptr + offset + rank, position, mask=id < E)


def scratch_elements(numel: int, num_experts: int) -> int:
    """int32 elements of scratch memory that `align_into` wants."""
    return 0 if numel <= _ONE_KERNEL else 2 * triton.cdiv(numel, _PART) * _bins(num_experts)


def _bins(num_experts: int) -> int:
    """Entries of a histogram: one an expert, at least one more for what is left out, a power of two."""
    return triton.next_power_of_2(num_experts + 1)


def align_into(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    sorted_ids: Tensor,
    expert_ids: Tensor,
    used: Tensor,
    scratch: Tensor,
    *,
    num_ids: int,
    id_map: Tensor | None = None,
    names: Tensor | None = None,
) -> None:
    """Writes the three results of `moe_cpu.align.moe_align_block_size` to given memory, whose content before does not matter.

    Args:
        topk_ids: contiguous, int32 or int64; a value outside [0, num_ids) is left out.
        id_map: `[num_ids]`, id -> expert, before sorting; what it maps outside [0, num_experts) is left out. None: an id is its expert.
        names: `[num_experts]`, what a block's entry of `expert_ids` says for an expert. None: the expert itself.
        scratch: int32, `scratch_elements` long.
    """
    numel, width = topk_ids.numel(), _bins(num_experts)
    mapped, named = id_map is not None, names is not None
    length, blocks = sorted_ids.numel(), expert_ids.numel()
    grid = (num_experts,)
    if scratch_elements(numel, num_experts) == 0:
        _align_in_one[grid](
            topk_ids, id_map, names, sorted_ids, expert_ids, used, numel, num_ids, length, blocks, block_size, num_experts,
            MAPPED=mapped, NAMED=named, EXPERTS=width, PART=_PART,
        )  # fmt: skip
        return
    parts = triton.cdiv(numel, _PART)
    counts, offsets = scratch[: parts * width], scratch[parts * width : 2 * parts * width]
    _count[(parts,)](
        topk_ids, id_map, counts, numel, num_ids, num_experts, MAPPED=mapped, PART=_PART, EXPERTS=width
    )  # fmt: skip
    _offsets[grid](
        counts, offsets, names, sorted_ids, expert_ids, used, parts, numel, length, blocks, block_size, num_experts,
        NAMED=named, EXPERTS=width, ROWS=max(1, 8192 // width), STEP=_STEP,
    )  # fmt: skip
    _scatter[(parts, _PART // _STEP)](
        topk_ids, id_map, offsets, sorted_ids, numel, num_ids, num_experts, MAPPED=mapped, PART=_PART, EXPERTS=width, STEP=_STEP,
        num_warps=8,
    )  # fmt: skip


def align(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Tensor | None, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`align_into` new memory."""
    device = topk_ids.device
    sorted_ids = torch.empty(length, dtype=torch.int32, device=device)
    expert_ids = torch.empty(triton.cdiv(length, block_size), dtype=torch.int32, device=device)
    used = torch.empty(1, dtype=torch.int32, device=device)
    scratch = torch.empty(scratch_elements(topk_ids.numel(), num_experts), dtype=torch.int32, device=device)
    align_into(
        topk_ids.contiguous(), block_size, num_experts, sorted_ids, expert_ids, used, scratch,
        num_ids=num_experts, names=expert_map,
    )  # fmt: skip
    return sorted_ids, expert_ids, used
