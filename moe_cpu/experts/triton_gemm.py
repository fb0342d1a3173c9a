"""The launches of a layer's two grouped GEMMs, from their shapes, strides and plan."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from moe_cpu.checks import default_gate_layout
from moe_cpu.experts import triton_kernels as kernels
from moe_cpu.experts.triton_launch import Launch, Plan, fitted
from moe_cpu.triton_program import Engine, Step, program

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_WEIGHT = 1  # position of the weight among both kernels' pointers


class Problem(NamedTuple):
    """What both GEMMs share. `mapped`: whether they look experts up in a map themselves. `sizes` is pairs, topk, num_ids, max_tokens, blocks, E, K, I, as `triton_kernels` calls them."""

    device: int
    plan: Plan
    order: int
    mapped: bool
    sizes: tuple[int, ...]


def first_gemm(
    problem: Problem, pointers: Sequence[int], index: tuple[Any, ...], activation: str, x: Tensor, w1: Tensor, bias: Tensor | None
) -> Step:  # fmt: skip
    """The launch of act(x w1^T + b1).

    Args:
        pointers: where the kernel's tensors stand in the table of a series, with an empty entry behind the weight's.
        index: dtypes of ids, map and counts, None where there is none.
    """
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
        problem, pointers, kernels.first_gemm, problem.plan.first, 2 if gated else 1, I, K, "EVEN_K", seen, w1, bias,
        (x.dtype, *index, K, I, strides), flags, numbers,
    )  # fmt: skip


def second_gemm(
    problem: Problem, pointers: Sequence[int], index: tuple[Any, ...], w2: Tensor, bias: Tensor | None, result: torch.dtype
) -> Step:  # fmt: skip
    """The launch of h w2^T + b2; arguments as of `first_gemm`."""
    pairs, _, num_ids, tokens, blocks, E, K, I = problem.sizes
    strides = (*w2.stride(), *((0, 0) if bias is None else bias.stride()))
    numbers = (pairs, num_ids, tokens, blocks, E, K, I, *strides)
    return _gemm(
        problem, pointers, kernels.second_gemm, problem.plan.second, 1, K, I, "EVEN_I", (E * K, I), w2, bias,
        (*index, result, K, I, strides), (), numbers,
    )  # fmt: skip


def _gemm(
    problem: Problem, pointers: Sequence[int], kernel: Any, launch: Launch, operands: int, columns: int, depth: int, even: str,
    seen: tuple[int, int], weight: Tensor, bias: Tensor | None, kinds: tuple[Any, ...],
    flags: tuple[tuple[str, Any], ...], numbers: tuple[int, ...],
) -> Step:  # fmt: skip
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
    reads = Engine(_WEIGHT, weight.dtype, seen, (launch.n, launch.k)) if tma else None
    return Step(made, grid, pointers, numbers, reads)


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
