"""One layer on the GPU: sort the pairs by expert, first GEMM with the activation, second GEMM, weighted sum.

What is launched for a call depends on its shapes, strides and dtypes alone. It is worked out once for each of them; a call then only adds addresses.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
from torch import Tensor

from moe_cpu.align_triton import Sort
from moe_cpu.checks import default_gate_layout
from moe_cpu.experts import triton_kernels as kernels
from moe_cpu.experts.triton_launch import Launch, Plan, blocks_bound, fitted, plan_for, sorts
from moe_cpu.experts.triton_scratch import DeviceScratch, Pieces
from moe_cpu.triton_program import Launcher, Program, descriptor, descriptor_of, program

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_SORTED, _UNSORTED, _BATCHED = kernels.SORTED.value, kernels.UNSORTED.value, kernels.BATCHED.value
# Columns of the weighted sum that one program takes.
_SUM_COLUMNS = 1024
# Forms of calls that are kept; a server that meets more starts afresh now and then.
_FORMS = 4096
# The plan asked for, the activation, the shape of topk_ids (of a batched input: E and max_num_tokens), and whether pairs are summed.
_What: TypeAlias = "tuple[Plan | None, str, tuple[int, ...], bool]"
_forms: dict[tuple[Any, ...], _Layer] = {}


def routed(
    scratch: DeviceScratch, plan: Plan | None, out: Tensor, x: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor | None,
    topk_ids: Tensor, activation: str, expert_map: Tensor | None, w1_bias: Tensor | None, w2_bias: Tensor | None,
    *, reduce: bool = False,
) -> None:  # fmt: skip
    """Writes `out [M, topk, K]`, or with `reduce` the sum over topk `out [M, K]`, weighted unless `topk_weights` is None."""
    if out.numel() == 0:
        return
    if topk_ids.numel() == 0:
        out.zero_()
        return
    ids = topk_ids.contiguous()
    map = None if expert_map is None else expert_map.contiguous()
    weights = topk_weights.contiguous() if reduce and topk_weights is not None else None
    tensors = (x, w1, w2, w1_bias, w2_bias, ids, map, None, weights, out)
    _run(scratch, (plan, activation, ids.shape, reduce), tensors)


def batched(
    scratch: DeviceScratch, plan: Plan | None, out: Tensor, x: Tensor, w1: Tensor, w2: Tensor, counts: Tensor | None,
    activation: str, w1_bias: Tensor | None, w2_bias: Tensor | None,
) -> None:  # fmt: skip
    """Writes the rows of `out [E, max_num_tokens, K]` that `counts [E]` calls real; None: all."""
    E, T, K = x.shape
    if x.numel() == 0:
        return
    if counts is None:
        counts = torch.full((E,), T, dtype=torch.int32, device=x.device)
    tensors = (x.reshape(E * T, K), w1, w2, w1_bias, w2_bias, None, None, counts.contiguous(), None, out)
    _run(scratch, (plan, activation, (E, T), False), tensors)


def _run(scratch: DeviceScratch, what: _What, tensors: tuple[Tensor | None, ...]) -> None:
    x, w1, w2 = tensors[:3]
    assert x is not None
    assert w1 is not None
    assert w2 is not None
    device = x.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _run(scratch, what, tensors)
    kinds = tuple([None if t is None else (t.dtype, t.stride()) for t in tensors])
    map = tensors[6]
    # The copy engine wants aligned weights.
    aligned = (w1.data_ptr() | w2.data_ptr()) % 16 == 0
    form = (device, what, w1.shape, w2.shape[2], None if map is None else map.shape[0], kinds, aligned)
    layer = _forms.get(form)
    if layer is None:
        if len(_forms) >= _FORMS:
            _forms.clear()
        layer = _forms[form] = _Layer(device, what, tensors)
    layer(scratch, tensors)
    return None


class _Gemm(NamedTuple):
    """A GEMM's launch; `seen` and `tile` are for its copy engine descriptor, None where threads load the weights."""

    program: Program
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    seen: tuple[int, int] | None
    tile: tuple[int, int]


class _Layer:
    """The launches of calls of one form."""

    def __init__(self, device: int, what: _What, tensors: tuple[Any, ...]) -> None:
        plan, activation, ids_shape, reduce = what
        x, w1, w2, w1_bias, w2_bias, ids, map, counts, weights, out = tensors
        E, K, I = w2.shape
        self.device, self.reduce, self.sort = device, reduce, None
        rows, topk = ids_shape
        pairs = rows * topk
        if ids is None:
            num_ids, order, tokens = E, _BATCHED, topk
            plan = plan or plan_for(tokens, 1)
            blocks, slots, sums, topk = E * triton.cdiv(tokens, plan.m), pairs, 0, 1
        else:
            num_ids, tokens = E if map is None else map.shape[0], 1
            # A rank that holds E of num_ids experts sees that share of the pairs.
            plan = plan or plan_for(pairs, num_ids)
            order, blocks, slots, sums = _UNSORTED, pairs, pairs, pairs * K if reduce else 0
            if sorts(rows, topk, num_ids):
                order, blocks = _SORTED, blocks_bound(pairs, E, plan.m)
                slots = blocks * plan.m
                self.sort = Sort(
                    device, pairs, plan.m, E, num_ids, slots, blocks, ids.dtype, map.dtype if map is not None else None, None
                )  # fmt: skip
        index = (
            (slots, blocks, 1, self.sort.scratch if self.sort is not None else 0)
            if order == _SORTED
            else (0,) * 4
        )
        self.pieces = Pieces(
            [(slots * I, w1.dtype), (sums, torch.float32), *((n, torch.int32) for n in index)]
        )
        self.finds_experts = order == _UNSORTED  # the GEMMs look at ids themselves
        self.dtype = w1.dtype
        mapped = self.finds_experts and map is not None
        problem = _Problem(device, plan, order, mapped, (pairs, topk, num_ids, tokens, blocks, E, K, I))
        pointers: tuple[Any, ...] = (
            (ids.dtype, map.dtype if map is not None else None) if self.finds_experts else (None, None)
        )
        pointers += (None if counts is None else counts.dtype,)
        self.first = _first(problem, pointers, activation, x, w1, w1_bias)
        self.second = _second(problem, pointers, w2, w2_bias, torch.float32 if reduce else out.dtype)
        self.programs = [self.first.program, self.second.program, *(self.sort.programs if self.sort else ())]
        self.last: Program | None = None
        if ids is None:
            return
        kinds: tuple[Any, ...] = (ids.dtype, map.dtype if map is not None else None, out.dtype, K)
        has_map, columns = ("HAS_MAP", map is not None), ("BLOCK_K", _SUM_COLUMNS)
        if reduce:
            kinds += (None if weights is None else weights.dtype, topk, *out.stride())
            flags = (has_map, ("HAS_WEIGHTS", weights is not None), ("INTERPRET", _INTERPRETED), columns)
            self.last = program(kernels.weighted_sum, device, kinds, flags)
            self.last_grid = (rows, triton.cdiv(K, _SUM_COLUMNS), 1)
            self.last_numbers: tuple[int, ...] = (topk, num_ids, E, K, *out.stride())
        else:
            self.last = program(kernels.clear_skipped, device, kinds, (has_map, columns))
            self.last_grid, self.last_numbers = (pairs, 1, 1), (num_ids, E, K)
        self.programs.append(self.last)

    def __call__(self, scratch: DeviceScratch, tensors: Sequence[Tensor | None]) -> None:
        launch = Launcher(self.device, self.programs, tensors)
        x, w1, w2, w1_bias, w2_bias, ids, map, counts, weights, out = launch.pointers
        pieces = scratch.take(self.device, launch.stream, self.pieces, launch.direct)
        h, y, sorted_ids, expert_ids, used, counted = pieces
        if self.sort is not None:
            self.sort(launch, ids, map, None, sorted_ids, expert_ids, used, counted)
            index: tuple[Any, ...] = (sorted_ids, expert_ids, used, None, None, counts)
        else:
            index = (
                None,
                None,
                None,
                ids if self.finds_experts else None,
                map if self.finds_experts else None,
                counts,
            )
        program, grid, numbers, seen, tile = self.first
        launch(program, grid, x, w1, self._descriptor(launch, w1, seen, tile), w1_bias, h, *index, *numbers)
        if not self.reduce:
            y = out
            if self.last is not None:
                launch(self.last, self.last_grid, out, ids, map, *self.last_numbers)
        program, grid, numbers, seen, tile = self.second
        launch(program, grid, h, w2, self._descriptor(launch, w2, seen, tile), w2_bias, y, *index, *numbers)
        if self.reduce:
            assert self.last is not None
            launch(self.last, self.last_grid, y, weights, ids, map, out, *self.last_numbers)

    def _descriptor(
        self, launch: Launcher, weight: Any, seen: tuple[int, int] | None, tile: tuple[int, int]
    ) -> Any:
        if seen is None:
            return None
        return (
            descriptor_of(weight, self.dtype, seen, tile) if launch.direct else descriptor(weight, seen, tile)
        )


class _Problem(NamedTuple):
    """What both GEMMs share. `mapped`: whether they look experts up in a map themselves. `sizes` is pairs, topk, num_ids, max_tokens, blocks, E, K, I, as `triton_kernels` calls them."""

    device: int
    plan: Plan
    order: int
    mapped: bool
    sizes: tuple[int, ...]


def _first(
    problem: _Problem, index: tuple[Any, ...], activation: str, x: Tensor, w1: Tensor, bias: Tensor | None
) -> _Gemm:
    pairs, topk, num_ids, tokens, blocks, E, K, I = problem.sizes
    layout = default_gate_layout(activation)
    gated, alternating = layout != "none", layout == "interleaved"
    e, n, k = w1.stride()
    be, bn = (0, 0) if bias is None else bias.stride()
    # From a channel's gate row to its up row, and to the next channel's gate row.
    up, step = (1, 2) if alternating else (I, 1)
    seen = (E * I, 2 * K) if alternating else (E * w1.shape[1], K)
    strides = (*x.stride(), e, n * step, k, be, bn * step, n * up, bn * up)
    flags = (("ACTIVATION", activation), ("GATED", gated), ("INTERLEAVED", alternating))
    numbers = (pairs, topk, num_ids, tokens, blocks, E, K, I, *strides)
    return _gemm(
        problem, kernels.first_gemm, problem.plan.first, 2 if gated else 1, I, K, "EVEN_K", seen, w1, bias,
        (x.dtype, *index, K, I, strides), flags, numbers,
    )  # fmt: skip


def _second(
    problem: _Problem, index: tuple[Any, ...], w2: Tensor, bias: Tensor | None, result: torch.dtype
) -> _Gemm:
    pairs, _, num_ids, tokens, blocks, E, K, I = problem.sizes
    strides = (*w2.stride(), *((0, 0) if bias is None else bias.stride()))
    numbers = (pairs, num_ids, tokens, blocks, E, K, I, *strides)
    return _gemm(
        problem, kernels.second_gemm, problem.plan.second, 1, K, I, "EVEN_I", (E * K, I), w2, bias,
        (*index, result, K, I, strides), (), numbers,
    )  # fmt: skip


def _gemm(
    problem: _Problem, kernel: Any, launch: Launch, operands: int, columns: int, depth: int, even: str,
    seen: tuple[int, int], weight: Tensor, bias: Tensor | None, kinds: tuple[Any, ...],
    flags: tuple[tuple[str, Any], ...], numbers: tuple[int, ...],
) -> _Gemm:  # fmt: skip
    device, plan, order = problem.device, problem.plan, problem.order
    shared, engine = _limits(device)
    launch = fitted(launch, plan.m, operands, weight.element_size(), shared)
    tma = launch.tma and engine and depth % launch.k == 0 and _suits_engine(weight, seen)
    kinds += (weight.dtype, None if bias is None else bias.dtype)
    constants = (
        ("ORDER", order), ("HAS_MAP", problem.mapped), ("HAS_BIAS", bias is not None), *flags,
        (even, depth % launch.k == 0), ("TMA", tma), ("INTERPRET", _INTERPRETED),
        ("BLOCK_M", plan.m), ("BLOCK_N", launch.n), ("BLOCK_K", launch.k), ("GROUP", launch.group),
    )  # fmt: skip
    made = program(kernel, device, kinds, constants, launch.warps, launch.stages)
    grid = (problem.sizes[4] * triton.cdiv(columns, launch.n), 1, 1)
    return _Gemm(made, grid, numbers, seen if tma else None, (launch.n, launch.k))


def _suits_engine(weight: Tensor, seen: tuple[int, int]) -> bool:
    """Whether the copy engine can read a weight as one matrix of that shape."""
    rows = seen[1] * weight.element_size()
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0 and rows % 16 == 0 and seen[0] < 2**31


@functools.cache
def _limits(device: int) -> tuple[int, bool]:
    """Bytes of shared memory that a program may have, and whether there is a copy engine for tiles."""
    if device < 0:
        return 1 << 30, True
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return int(properties["max_shared_mem"]), torch.cuda.get_device_capability(device) >= (9, 0)
