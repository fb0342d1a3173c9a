"""One layer on the GPU: sort the pairs by expert, first GEMM with the activation, second GEMM, weighted sum. Launches and nothing else."""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from moe_cpu.align_triton import align_into, scratch_elements
from moe_cpu.checks import default_gate_layout
from moe_cpu.experts import triton_kernels as kernels
from moe_cpu.experts.triton_launch import Launch, Plan, blocks_bound, fitted, plan_for, sorts
from moe_cpu.experts.triton_scratch import DeviceScratch

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_SORTED, _UNSORTED, _BATCHED = kernels.SORTED.value, kernels.UNSORTED.value, kernels.BATCHED.value
# Columns of the weighted sum that one program takes.
_SUM_COLUMNS = 1024


class _Rows(NamedTuple):
    """Which rows the GEMMs run over, as `triton_kernels` describes ORDER. What an order does not use is None."""

    order: int
    blocks: int
    pairs: int
    topk: int
    max_tokens: int
    num_ids: int
    sorted_ids: Tensor | None = None
    expert_ids: Tensor | None = None
    used: Tensor | None = None
    ids: Tensor | None = None
    map: Tensor | None = None
    counts: Tensor | None = None


class _Weights(NamedTuple):
    w1: Tensor
    w2: Tensor
    w1_bias: Tensor | None
    w2_bias: Tensor | None
    activation: str


def routed(
    scratch: DeviceScratch, plan: Plan | None, out: Tensor, x: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor | None,
    topk_ids: Tensor, activation: str, expert_map: Tensor | None, w1_bias: Tensor | None, w2_bias: Tensor | None,
    *, reduce: bool = False,
) -> None:  # fmt: skip
    """Writes `out [M, topk, K]`, or with `reduce` the sum over topk `out [M, K]`, weighted unless `topk_weights` is None."""
    M, topk = topk_ids.shape
    E, K, I = w2.shape
    pairs, device = M * topk, x.device
    if out.numel() == 0:
        return
    if pairs == 0:
        out.zero_()
        return
    num_ids = E if expert_map is None else expert_map.shape[0]
    ids = topk_ids.contiguous()
    map = None if expert_map is None else expert_map.contiguous()
    # A rank that holds E of num_ids experts sees that share of the pairs.
    plan = plan or plan_for(pairs, num_ids)
    sort = sorts(M, topk, num_ids)
    blocks = blocks_bound(pairs, E, plan.m) if sort else pairs
    slots = blocks * plan.m if sort else pairs
    sums = pairs * K if reduce else 0
    sorting = (slots, blocks, 1, scratch_elements(pairs, E)) if sort else (0, 0, 0, 0)
    h, y, *index = scratch.take(
        device, [(slots * I, w1.dtype), (sums, torch.float32), *((n, torch.int32) for n in sorting)]
    )
    if sort:
        sorted_ids, expert_ids, used, counts = index
        align_into(ids, plan.m, E, sorted_ids, expert_ids, used, counts, num_ids=num_ids, id_map=map)
        rows = _Rows(_SORTED, blocks, pairs, topk, 1, num_ids, sorted_ids, expert_ids, used)
    else:
        rows = _Rows(_UNSORTED, blocks, pairs, topk, 1, num_ids, ids=ids, map=map)
    weights = _Weights(w1, w2, w1_bias, w2_bias, activation)
    if not reduce:
        kernels.clear_skipped[(pairs,)](
            out, ids, map, num_ids, E, K, HAS_MAP=map is not None, BLOCK_K=_SUM_COLUMNS
        )
        _gemms(plan, rows, x, h, out, weights)
        return
    _gemms(plan, rows, x, h, y, weights)
    kernels.weighted_sum[(M, triton.cdiv(K, _SUM_COLUMNS))](
        y, None if topk_weights is None else topk_weights.contiguous(), ids, map, out, topk, num_ids, E, K, *out.stride(),
        HAS_MAP=map is not None, HAS_WEIGHTS=topk_weights is not None, INTERPRET=_INTERPRETED, BLOCK_K=_SUM_COLUMNS,
    )  # fmt: skip


def batched(
    scratch: DeviceScratch, plan: Plan | None, out: Tensor, x: Tensor, w1: Tensor, w2: Tensor, counts: Tensor | None,
    activation: str, w1_bias: Tensor | None, w2_bias: Tensor | None,
) -> None:  # fmt: skip
    """Writes the rows of `out [E, max_num_tokens, K]` that `counts [E]` calls real; None: all."""
    E, T, K = x.shape
    if x.numel() == 0:
        return
    plan = plan or plan_for(T, 1)
    if counts is None:
        counts = torch.full((E,), T, dtype=torch.int32, device=x.device)
    (h,) = scratch.take(x.device, [(E * T * w2.shape[2], w1.dtype)])
    rows = _Rows(_BATCHED, E * triton.cdiv(T, plan.m), E * T, 1, T, E, counts=counts.contiguous())
    _gemms(plan, rows, x.reshape(E * T, K), h, out, _Weights(w1, w2, w1_bias, w2_bias, activation))


def _gemms(plan: Plan, rows: _Rows, x: Tensor, h: Tensor, y: Tensor, weights: _Weights) -> None:
    w1, w2, b1, b2, activation = weights
    E, K, I = w2.shape
    layout = default_gate_layout(activation)
    gated, alternating = layout != "none", layout == "interleaved"
    shared, engine = _limits(x.device.index) if x.is_cuda else (1 << 30, True)
    order = rows.order
    first = fitted(plan.first, plan.m, 2 if gated else 1, w1.element_size(), shared)
    second = fitted(plan.second, plan.m, 1, w2.element_size(), shared)
    index = (rows.sorted_ids, rows.expert_ids, rows.used, rows.ids, rows.map, rows.counts)
    e, n, k = w1.stride()
    be, bn = (0, 0) if b1 is None else b1.stride()
    # From a channel's gate row to its up row, and to the next channel's gate row.
    up, step = (1, 2) if alternating else (I, 1)
    seen = (E * I, 2 * K) if alternating else (E * w1.shape[1], K)
    desc = _descriptor(w1, seen, first) if engine and K % first.k == 0 else None
    kernels.first_gemm[(rows.blocks * triton.cdiv(I, first.n),)](
        x, w1, desc, b1, h, *index, rows.pairs, rows.topk, rows.num_ids, rows.max_tokens, rows.blocks, E, K, I,
        *x.stride(), e, n * step, k, be, bn * step, n * up, bn * up,
        ORDER=order, HAS_MAP=rows.map is not None, HAS_BIAS=b1 is not None, ACTIVATION=activation, GATED=gated,
        INTERLEAVED=alternating, EVEN_K=K % first.k == 0, TMA=desc is not None, INTERPRET=_INTERPRETED,
        BLOCK_M=plan.m, BLOCK_N=first.n, BLOCK_K=first.k, GROUP=first.group, num_warps=first.warps, num_stages=first.stages,
    )  # fmt: skip
    be, bn = (0, 0) if b2 is None else b2.stride()
    desc = _descriptor(w2, (E * K, I), second) if engine and I % second.k == 0 else None
    kernels.second_gemm[(rows.blocks * triton.cdiv(K, second.n),)](
        h, w2, desc, b2, y, *index, rows.pairs, rows.num_ids, rows.max_tokens, rows.blocks, E, K, I,
        *w2.stride(), be, bn,
        ORDER=order, HAS_MAP=rows.map is not None, HAS_BIAS=b2 is not None,
        EVEN_I=I % second.k == 0, TMA=desc is not None, INTERPRET=_INTERPRETED,
        BLOCK_M=plan.m, BLOCK_N=second.n, BLOCK_K=second.k, GROUP=second.group, num_warps=second.warps, num_stages=second.stages,
    )  # fmt: skip


def _descriptor(weight: Tensor, shape: tuple[int, int], launch: Launch) -> Any:
    """What the copy engine needs to load `[n, k]` tiles of a weight seen as one matrix of that shape, or None where it cannot."""
    if not launch.tma or not weight.is_contiguous() or weight.data_ptr() % 16:
        return None
    if shape[1] * weight.element_size() % 16 or shape[0] >= 2**31:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(weight, list(shape), [shape[1], 1], [launch.n, launch.k])


@functools.cache
def _limits(device: int) -> tuple[int, bool]:
    """Bytes of shared memory that a program may have, and whether there is a copy engine for tiles."""
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return int(properties["max_shared_mem"]), torch.cuda.get_device_capability(device) >= (9, 0)
