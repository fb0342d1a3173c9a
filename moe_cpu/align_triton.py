"""`moe_align_block_size` on the GPU: a stable counting sort without a synchronisation.

Few ids: one kernel, a program for each expert, which counts all ids itself and so needs to hear nothing from the others.
Many ids: two kernels, a program for each part of the ids. The first counts its part and pads a share of the result; the second adds up the counts of all parts,
which the L2 cache holds, and so knows where every expert's run starts and where its part's share of the run does. It puts its ids in order by sorting small
chunks of (expert, position), all different, so the order is stable; no rank comes from an atomic.

The host cannot see an id without waiting for the GPU, so an id out of range is left out like -1.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_cpu.triton_program import Program, Series, Step, addresses_of, current_stream, program

# Ids up to which every expert's program may count them all, at most this many at a time.
_ONE_KERNEL, _SLICE = 4096, 1024
# Above: programs at most, one for each multiprocessor of a large GPU. Each of them reads the counts of all.
_PARTS = 128
# Ids that a program sorts at a time, and its warps: small chunks until there are programs enough.
_SMALL, _LARGE = (256, 4), (1024, 8)
# Counts that a program adds up at a time: 32 for each thread.
_COUNTS = 8192


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
def _histogram(id, E, EXPERTS: tl.constexpr):
    """How often each expert occurs; what is left out is counted with expert 0 and taken off, so that 2^n experts need no entry more than 2^n."""
    out = id >= E
    counts = tl.histogram(tl.where(out, 0, id), EXPERTS)
    return counts - tl.where(tl.arange(0, EXPERTS) == 0, tl.sum(out.to(tl.int32), 0), 0)


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
    MAPPED: tl.constexpr, NAMED: tl.constexpr, EXPERTS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    for at in range(0, numel, SLICE):
        id = _load(ids_ptr, map_ptr, at + tl.arange(0, SLICE), numel, num_ids, E, MAPPED)
        counts += _histogram(id, E, EXPERTS)
    place = _finish(
        expert, counts, sorted_ptr, experts_ptr, used_ptr, names_ptr, numel, length, num_blocks, size, E, NAMED, EXPERTS
    )  # fmt: skip
    for at in range(0, numel, SLICE):
        position = at + tl.arange(0, SLICE)
        mine = (_load(ids_ptr, map_ptr, position, numel, num_ids, E, MAPPED) == expert).to(tl.int32)
        tl.store(sorted_ptr + place + tl.cumsum(mine, 0) - 1, position, mask=mine > 0)
        place += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["numel", "num_ids", "E", "chunks", "length", "share"])
def _count(
    ids_ptr, map_ptr, counts_ptr, sorted_ptr, numel, num_ids, E, chunks, length, share,
    MAPPED: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """counts[part, e]; `share` entries of the sorted ids become padding."""
    part = tl.program_id(0)
    _fill(sorted_ptr, part * share, tl.minimum((part + 1) * share, length), numel, 1024)
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    for chunk in range(chunks):
        position = (part * chunks + chunk) * CHUNK + tl.arange(0, CHUNK)
        counts += _histogram(_load(ids_ptr, map_ptr, position, numel, num_ids, E, MAPPED), E, EXPERTS)
    tl.store(counts_ptr + part * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit(do_not_specialize=["parts", "numel", "num_ids", "E", "chunks", "num_blocks", "share"])
def _place(
    ids_ptr, map_ptr, names_ptr, counts_ptr, sorted_ptr, experts_ptr, used_ptr,
    parts, numel, num_ids, E, chunks, num_blocks, share, size,
    MAPPED: tl.constexpr, NAMED: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Writes a part's ids where they belong, and the experts of `share` blocks."""
    part = tl.program_id(0)
    which = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    before = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(0, parts, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        counts = tl.load(counts_ptr + row * EXPERTS + which[None, :], mask=row < parts, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(row < part, counts, 0), 0)
    padded = (total + size - 1) // size * size
    end = tl.cumsum(padded, 0)
    tl.store(used_ptr, tl.sum(padded, 0), mask=part == 0)
    rest_name = tl.load(names_ptr).to(tl.int32) if NAMED else 0
    until = tl.minimum((part + 1) * share, num_blocks)
    for at in range(part * share, until, BLOCKS):
        block = at + tl.arange(0, BLOCKS)
        # Every run that ends at or before a block belongs to an expert before the block's own.
        ended = (end[None, :] <= (block * size)[:, None]) & (which < E)[None, :]
        name = tl.sum(ended.to(tl.int32), 1)
        used = name < E
        if NAMED:
            name = tl.load(names_ptr + name, mask=used, other=0).to(tl.int32)
        tl.store(experts_ptr + block, tl.where(used, name, rest_name), mask=block < until)
    place = end - padded + before
    lane = tl.arange(0, CHUNK)
    for chunk in range(chunks):
        start = (part * chunks + chunk) * CHUNK
        key = tl.sort(_load(ids_ptr, map_ptr, start + lane, numel, num_ids, E, MAPPED) * CHUNK + lane)
        id = key // CHUNK
        counts = _histogram(id, E, EXPERTS)
        # From an id's place in the sorted chunk to its place in the result.
        shift = tl.gather(place - (tl.cumsum(counts, 0) - counts), tl.minimum(id, E - 1), 0)
        tl.store(sorted_ptr + lane + shift, start + key % CHUNK, mask=id < E)
        place += counts


class Sort:
    """The steps that group `numel` ids.

    Args:
        device: index of the GPU, -1 in the interpreter.
        length, blocks: of `sorted_ids` and `expert_ids`.
        num_ids: an id outside [0, num_ids) is left out.
        ids, map, names: dtypes; None where there is no map or are no names.
    Attributes:
        scratch: int32 elements of scratch memory.
    """

    def __init__(
        self, device: int, numel: int, block_size: int, num_experts: int, num_ids: int, length: int, blocks: int,
        ids: torch.dtype, map: torch.dtype | None, names: torch.dtype | None,
    ) -> None:  # fmt: skip
        width = max(2, triton.next_power_of_2(num_experts))
        mapped, named, experts = ("MAPPED", map is not None), ("NAMED", names is not None), ("EXPERTS", width)
        if numel <= _ONE_KERNEL:
            self.scratch = 0
            self.grid = (num_experts, 1, 1)
            self.numbers: tuple[int, ...] = (numel, num_ids, length, blocks, block_size, num_experts)
            piece = ("SLICE", max(128, min(_SLICE, triton.next_power_of_2(numel))))
            self.programs: tuple[Program, ...] = (
                program(
                    _align_in_one, device, (ids, map, names, block_size), (mapped, named, experts, piece)
                ),
            )
            return
        size, warps = _SMALL if numel <= _SMALL[0] * _PARTS else _LARGE
        chunks = triton.cdiv(numel, size * _PARTS)
        parts = triton.cdiv(numel, size * chunks)
        self.scratch = parts * width
        self.grid = (parts, 1, 1)
        self.counted = (numel, num_ids, num_experts, chunks, length, triton.cdiv(length, parts))
        self.numbers = (
            parts,
            numel,
            num_ids,
            num_experts,
            chunks,
            blocks,
            triton.cdiv(blocks, parts),
            block_size,
        )
        chunk, rows = ("CHUNK", size), ("ROWS", max(1, min(_PARTS, _COUNTS * warps // 8 // width)))
        self.programs = (
            program(_count, device, (ids, map), (mapped, experts, chunk), warps),
            program(
                _place, device, (ids, map, names, block_size), (mapped, named, experts, chunk, rows, ("BLOCKS", 32)), warps
            ),
        )  # fmt: skip

    def steps(
        self, ids: int, map: int, names: int, sorted_ids: int, expert_ids: int, used: int, counts: int
    ) -> list[Step]:
        """What writes the three results of `moe_cpu.align.moe_align_block_size` to given memory, whose content before does not matter.

        Args: places in the table of pointers.
            ids: contiguous.
            map: `[num_ids]`, id -> expert, before sorting; what it maps outside [0, num_experts) is left out. None: an id is its expert.
            names: `[num_experts]`, what a block's entry of `expert_ids` says for an expert. None: the expert itself.
            counts: scratch memory.
        """
        results = (sorted_ids, expert_ids, used)
        if self.scratch == 0:
            return [Step(self.programs[0], self.grid, (ids, map, names, *results), self.numbers)]
        count, place = self.programs
        return [
            Step(count, self.grid, (ids, map, counts, sorted_ids), self.counted),
            Step(place, self.grid, (ids, map, names, counts, *results), self.numbers),
        ]


@functools.lru_cache(maxsize=1024)
def _series_for(device: int, *what: Any) -> tuple[Series, int]:
    """The launches of `align`, whose tables are ids, no map, names, the results and scratch memory; and how much of that."""
    sort = Sort(device, *what)
    return Series(sort.steps(*range(7))), sort.scratch


def align(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Tensor | None, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_cpu.align.moe_align_block_size` of checked arguments, into new memory."""
    device = topk_ids.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return align(topk_ids, block_size, num_experts, expert_map, length)
    ids, blocks = topk_ids.contiguous(), -(-length // block_size)
    series, scratch = _series_for(
        device, ids.numel(), block_size, num_experts, num_experts, length, blocks, ids.dtype, None,
        None if expert_map is None else expert_map.dtype,
    )  # fmt: skip
    sorted_ids, expert_ids, used = (ids.new_empty(n, dtype=torch.int32) for n in (length, blocks, 1))
    counts = ids.new_empty(scratch, dtype=torch.int32) if scratch else None
    table = (ids, None, expert_map, sorted_ids, expert_ids, used, counts)
    addresses, aligned = addresses_of(table)
    if aligned and series.ready:
        series.direct(current_stream(device), addresses)
    else:
        series.through_triton(aligned, table)
    return sorted_ids, expert_ids, used
