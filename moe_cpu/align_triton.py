"""`moe_align_block_size` on the GPU: a stable counting sort without a synchronisation.

Few ids: one kernel, a program for each expert, which counts all ids itself and so needs to hear nothing from the others.
Many ids: three kernels. Each part of the ids is counted; each expert's program adds up where its run starts and where each part's share of the run does;
then a program for each piece of a part writes its ids, placed by their rank among equal ids of the part: a histogram of the pieces before, and comparisons
within the piece. No rank comes from an atomic, so the order is stable.

The host cannot see an id without waiting for the GPU, so an id out of range is left out like -1.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_cpu.triton_program import Launcher, Program, program

# Ids compared with each other at a time, and ids that one program counts at a time.
_STEP, _PART = 64, 1024
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
    first = start + step * STEP
    id = _load(ids_ptr, map_ptr, first + lane, numel, num_ids, E, MAPPED)
    before = _load(ids_ptr, map_ptr, start + tl.arange(0, PART), tl.minimum(first, numel), num_ids, E, MAPPED)
    rank = tl.gather(tl.histogram(before, EXPERTS), id, 0)
    same = (id[None, :] == id[:, None]) & (lane[None, :] < lane[:, None])
    rank += tl.sum(same.to(tl.int32), 1)
    offset = tl.load(offsets_ptr + part * EXPERTS + id, mask=id < E, other=0)
    tl.store(sorted_ptr + offset + rank, first + lane, mask=id < E)


class Sort:
    """The launches that group `numel` ids.

    Args:
        device: index of the GPU, -1 in the interpreter.
        length, blocks: of `sorted_ids` and `expert_ids`.
        num_ids: an id outside [0, num_ids) is left out.
        ids, map, names: dtypes; None where there is no map or are no names.
    Attributes:
        scratch: int32 elements of each of two pieces of scratch memory.
    """

    def __init__(
        self, device: int, numel: int, block_size: int, num_experts: int, num_ids: int, length: int, blocks: int,
        ids: torch.dtype, map: torch.dtype | None, names: torch.dtype | None,
    ) -> None:  # fmt: skip
        width = triton.next_power_of_2(num_experts + 1)  # one entry at least for what is left out
        self.parts = 0 if numel <= _ONE_KERNEL else triton.cdiv(numel, _PART)
        self.scratch = self.parts * width
        self.sizes = (numel, num_ids, num_experts)
        self.bounds = (numel, length, blocks, block_size, num_experts)
        self.in_one = (numel, num_ids, length, blocks, block_size, num_experts)
        self.grid = (num_experts, 1, 1)
        mapped, named = ("MAPPED", map is not None), ("NAMED", names is not None)
        experts, part, step = ("EXPERTS", width), ("PART", _PART), ("STEP", _STEP)
        if self.parts == 0:
            kinds = (ids, map, names, block_size)
            self.programs: tuple[Program, ...] = (
                program(_align_in_one, device, kinds, (mapped, named, experts, part)),
            )
            return
        rows = ("ROWS", max(1, 8192 // width))
        self.programs = (
            program(_count, device, (ids, map), (mapped, part, experts)),
            program(_offsets, device, (names, block_size), (named, experts, rows, step)),
            program(_scatter, device, (ids, map), (mapped, part, experts, step)),
        )

    def __call__(
        self, launch: Launcher, ids: object, map: object, names: object, sorted_ids: object, expert_ids: object, used: object,
        counts: object, offsets: object,
    ) -> None:  # fmt: skip
        """Writes the three results of `moe_cpu.align.moe_align_block_size` to given memory, whose content before does not matter.

        Args:
            launch: what the pointers here are for.
            ids: contiguous.
            map: `[num_ids]`, id -> expert, before sorting; what it maps outside [0, num_experts) is left out. None: an id is its expert.
            names: `[num_experts]`, what a block's entry of `expert_ids` says for an expert. None: the expert itself.
            counts, offsets: scratch memory.
        """
        if self.parts == 0:
            (one,) = self.programs
            launch(one, self.grid, ids, map, names, sorted_ids, expert_ids, used, *self.in_one)
            return
        count, offset, scatter = self.programs
        launch(count, (self.parts, 1, 1), ids, map, counts, *self.sizes)
        launch(
            offset, self.grid, counts, offsets, names, sorted_ids, expert_ids, used, self.parts, *self.bounds
        )
        launch(scatter, (self.parts, _PART // _STEP, 1), ids, map, offsets, sorted_ids, *self.sizes)


@functools.lru_cache(maxsize=1024)
def sort_for(*what: object) -> Sort:
    """A `Sort` that is kept."""
    return Sort(*what)  # type: ignore[arg-type]


def align(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Tensor | None, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_cpu.align.moe_align_block_size` of checked arguments, into new memory."""
    device = topk_ids.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return align(topk_ids, block_size, num_experts, expert_map, length)
    ids, blocks = topk_ids.contiguous(), triton.cdiv(length, block_size)
    sort = sort_for(
        device, ids.numel(), block_size, num_experts, num_experts, length, blocks, ids.dtype, None,
        None if expert_map is None else expert_map.dtype,
    )  # fmt: skip
    sizes = (length, blocks, 1, sort.scratch, sort.scratch)
    results = [torch.empty(n, dtype=torch.int32, device=ids.device) for n in sizes]
    launch = Launcher(device, sort.programs, (ids, expert_map, *results))
    at, names, *pointers = launch.pointers
    sort(launch, at, None, names, *pointers)
    return results[0], results[1], results[2]
