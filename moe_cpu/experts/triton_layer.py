"""One layer on the GPU: sort the pairs by expert, first GEMM with the activation, second GEMM, weighted sum.

What is launched for a call depends on its *form*: the shapes, strides, dtypes and device of its tensors. It is worked out once for each of them; a call then
only adds addresses.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from moe_cpu.align_triton import Sort
from moe_cpu.errors import no_memory_error
from moe_cpu.experts import triton_kernels as kernels
from moe_cpu.experts.triton_gemm import Problem, first_gemm, second_gemm
from moe_cpu.experts.triton_launch import Plan, blocks_bound, plan_for, sorts
from moe_cpu.experts.triton_scratch import DeviceScratch, Pieces
from moe_cpu.triton_program import Series, Step, addresses_of, current_stream, program

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_SORTED, _UNSORTED, _BATCHED = kernels.SORTED.value, kernels.UNSORTED.value, kernels.BATCHED.value
# Columns of the weighted sum that one program takes.
_SUM_COLUMNS = 1024
# Forms of calls that are kept; a server that meets more starts afresh now and then.
_FORMS = 4096
_forms: dict[tuple[Any, ...], _Layer] = {}
# The table of pointers that a layer's launches take theirs from: the caller's tensors, nothing, scratch memory.
_X, _W1, _W2, _W1_BIAS, _W2_BIAS, _IDS, _MAP, _COUNTS, _WEIGHTS, _OUT = range(10)
_NONE, _H, _Y, _SORTED_IDS, _EXPERT_IDS, _USED, _COUNTED = range(10, 17)


def routed(
    scratch: DeviceScratch, plan: Plan | None, out: Tensor, x: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor | None,
    topk_ids: Tensor, activation: str, expert_map: Tensor | None, w1_bias: Tensor | None, w2_bias: Tensor | None,
) -> None:  # fmt: skip
    """Writes `out [M, topk, K]`, or the sum over topk to `out [M, K]`, weighted unless `topk_weights` is None."""
    if out.numel() == 0:
        return
    if topk_ids.numel() == 0:
        out.zero_()
        return
    ids, map, weights = (None if t is None else t.contiguous() for t in (topk_ids, expert_map, topk_weights))
    _run(scratch, plan, activation, (x, w1, w2, w1_bias, w2_bias, ids, map, None, weights, out))


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
    _run(scratch, plan, activation, tensors)


def known(
    scratch: DeviceScratch, plan: Plan | None, x: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: Any,
    global_num_experts: Any, expert_map: Any, w1_bias: Any, w2_bias: Any,
) -> Tensor | None:  # fmt: skip
    """The weighted sum `[M, K]` of a call whose form has run here, so there is nothing left to check; None, with nothing done, for any other arguments.

    For a few tokens the GPU waits for the host: the result's memory is asked for last, when there is work under way.
    """
    try:
        device = x.get_device()
        kinds = _kinds((x, w1, w2, w1_bias, w2_bias, topk_ids, expert_map, None, topk_weights))
        contiguous = (x.dtype, x.shape, (x.shape[1], 1), device, False)
        layer = _forms.get((plan, activation, (True, True), *kinds, contiguous))
        if layer is None or not layer.series.ready or global_num_experts not in (-1, layer.num_ids):
            return None
        if device != torch.cuda.current_device():
            return None
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None  # whatever was malformed, a check of the arguments names it
    table, aligned = addresses_of(
        (x, w1, w2, w1_bias, w2_bias, topk_ids, expert_map, None, topk_weights, None)
    )
    if not aligned or 0 in table:
        return None
    stream = current_stream(device)
    layer.complete(table, scratch, stream)
    *steps, last = layer.series.steps
    for step in steps:
        step.direct(stream, table)
    out = x.new_empty(x.shape)
    table[_OUT] = out.data_ptr()
    last.direct(stream, table)
    return out


def _kinds(tensors: Iterable[Any]) -> list[Any]:
    return [
        None if t is None else (t.dtype, t.shape, t.stride(), t.get_device(), t.is_neg()) for t in tensors
    ]


def _run(
    scratch: DeviceScratch, plan: Plan | None, activation: str, tensors: tuple[Tensor | None, ...]
) -> None:
    """Launches for checked arguments, those of the table, on whatever device they are."""
    *given, out = tensors
    tensors = (*(None if t is None else t.resolve_neg() for t in given), out)
    assert out is not None
    device = out.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _run(scratch, plan, activation, tensors)
    table, aligned = addresses_of(tensors)
    if 0 in table and any(
        at == 0 and t is not None and t.numel() > 0 for at, t in zip(table, tensors, strict=True)
    ):
        raise no_memory_error("fused experts")
    # The copy engine wants aligned weights; each of the two may have it.
    engine = tuple(table[w] is not None and table[w] % 16 == 0 for w in (_W1, _W2))
    form = (plan, activation, engine, *_kinds(tensors))
    layer = _forms.get(form)
    if layer is None:
        if len(_forms) >= _FORMS:
            _forms.clear()
        layer = _forms[form] = _Layer(device, plan, activation, tensors)
    stream = current_stream(device)
    if aligned and layer.series.ready:
        layer.complete(table, scratch, stream)
        layer.series.direct(stream, table)
    else:
        layer.series.through_triton(aligned, layer.completed(tensors, scratch, stream))
    return None


class _Layer:
    """The launches of calls of one form."""

    def __init__(self, device: int, plan: Plan | None, activation: str, tensors: tuple[Any, ...]) -> None:
        x, w1, w2, w1_bias, w2_bias, ids, map, counts, weights, out = tensors
        E, K, I = w2.shape
        reduce, sort = out.dim() == 2, None
        rows, topk = out.shape[:2] if ids is None else ids.shape
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
                sort = Sort(
                    device, pairs, plan.m, E, num_ids, slots, blocks, ids.dtype, None if map is None else map.dtype, None
                )  # fmt: skip
        index = (0,) * 4 if sort is None else (slots, blocks, 1, sort.scratch)
        self.pieces = Pieces(
            [(slots * I, w1.dtype), (sums, torch.float32), *((n, torch.int32) for n in index)]
        )
        self.device, self.num_ids = device, num_ids
        mapped = order == _UNSORTED and map is not None  # the GEMMs look at ids themselves
        problem = Problem(device, plan, order, mapped, (pairs, topk, num_ids, tokens, blocks, E, K, I))
        id_kinds: tuple[Any, ...] = (None if ids is None else ids.dtype, None if map is None else map.dtype)
        searched = id_kinds if order == _UNSORTED else (None, None)
        index_kinds = (*searched, None if counts is None else counts.dtype)
        where = {
            _SORTED: (_SORTED_IDS, _EXPERT_IDS, _USED, _NONE, _NONE, _NONE),
            _UNSORTED: (_NONE, _NONE, _NONE, _IDS, _MAP, _NONE),
            _BATCHED: (_NONE, _NONE, _NONE, _NONE, _NONE, _COUNTS),
        }[order]
        steps = (
            [] if sort is None else sort.steps(_IDS, _MAP, _NONE, _SORTED_IDS, _EXPERT_IDS, _USED, _COUNTED)
        )
        pointers = (_X, _W1, _NONE, _W1_BIAS, _H, *where)
        steps.append(first_gemm(problem, pointers, index_kinds, activation, x, w1, w1_bias))
        pointers = (_H, _W2, _NONE, _W2_BIAS, _Y if reduce else _OUT, *where)
        down = second_gemm(
            problem, pointers, index_kinds, w2, w2_bias, torch.float32 if reduce else out.dtype
        )
        has_map, kinds = ("HAS_MAP", map is not None), (*id_kinds, out.dtype, K)
        if reduce:
            kinds += (None if weights is None else weights.dtype, topk, *out.stride())
            flags = (
                has_map,
                ("HAS_WEIGHTS", weights is not None),
                ("INTERPRET", _INTERPRETED),
                ("BLOCK_K", _SUM_COLUMNS),
            )
            last = program(kernels.weighted_sum, device, kinds, flags)
            grid, numbers = (rows, triton.cdiv(K, _SUM_COLUMNS), 1), (topk, num_ids, E, K, *out.stride())
            steps += [down, Step(last, grid, (_Y, _WEIGHTS, _IDS, _MAP, _OUT), numbers)]
        else:
            if ids is not None:
                clear = program(kernels.clear_skipped, device, kinds, (has_map, ("BLOCK_K", _SUM_COLUMNS)))
                steps.append(Step(clear, (pairs, 1, 1), (_OUT, _IDS, _MAP), (num_ids, E, K)))
            steps.append(down)
        self.series = Series(steps)

    def completed(self, tensors: Sequence[Any], scratch: DeviceScratch, stream: int) -> list[Any]:
        """The table with tensors."""
        return [*tensors, None, *scratch.tensors(self.device, stream, self.pieces)]

    def complete(self, table: list[Any], scratch: DeviceScratch, stream: int) -> None:
        """Adds what is missing to a table with the addresses of the caller's tensors."""
        table += (None, *scratch.addresses(self.device, stream, self.pieces))
